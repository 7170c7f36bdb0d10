"""The loss over a hundred steps of one shape with random weights, for one way of dividing state over replicas.

    torchrun --nproc-per-node 2 -m benchmarks.trainer.loss_curves --model Qwen/Qwen2.5-0.5B --sharding FSDP >> LOG

Texts are drawn from a language in which a word has few successors, so that there is something to learn; every run of
a shape sees the same. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.trainer.engines import Started, joined, loss, started
from moejob_api.job import Spec
from moejob_api.models import catalog
from moejob_trainer.engine import Document, MicroBatch

# Words of the language, and how many may follow each: 5.5 bits a token at first, less than 2 for who knows them.
WORDS, SUCCESSORS = 2048, 4
LEARNING_RATE, WARM_UP_STEPS = 1e-4, 10
SHOWN_STEPS = 10


def main() -> None:
    """Trains and prints."""
    chosen = _arguments()
    of_rank = started(dict(catalog.config(chosen.model) or {}), _spec(chosen), joined(), _rate, alike=True)
    random = np.random.default_rng(1)
    words = random.choice(of_rank.model.shape.vocabulary, WORDS, replace=False)
    successors = random.integers(0, WORDS, (WORDS, SUCCESSORS))
    losses, norms, begun = [], [], time.perf_counter()
    for _ in range(chosen.steps):
        texts = [_text(random, words, successors, chosen.length) for _ in range(chosen.batch)]
        result = of_rank.engine.update(_batch(of_rank, texts), loss)
        losses.append(round(result.loss, 5))
        norms.append(round(result.gradient_norm, 5))
        if of_rank.groups.world.rank == 0 and len(losses) % SHOWN_STEPS == 1:
            # Of a run that is cut off, too, one sees how far it came.
            print(f"{time.perf_counter() - begun:.0f} s, step {len(losses)}: {losses[-1]}", file=sys.stderr, flush=True)
    if of_rank.groups.world.rank == 0:
        print(
            json.dumps(
                {
                    "curve": vars(chosen) | {"ranks": dist.get_world_size()},
                    "losses": losses,
                    "norms": norms,
                    "seconds": round(time.perf_counter() - begun, 1),
                    "peakGiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name(),
                }
            )
        )
    dist.destroy_process_group()


def _rate(update: int) -> float:
    return LEARNING_RATE * min(1.0, (update + 1) / WARM_UP_STEPS)


def _text(random: np.random.Generator, words: np.ndarray, successors: np.ndarray, most: int) -> np.ndarray:
    """Return the tokens of one text, from half of `most` on."""
    place, places = int(random.integers(0, WORDS)), []
    for choice in random.integers(0, SUCCESSORS, int(random.integers(most // 2, most + 1))):
        places.append(place)
        place = int(successors[place, choice])
    found: np.ndarray = words[places]
    return found


def _batch(of_rank: Started, texts: list[np.ndarray]) -> list[MicroBatch]:
    return of_rank.micro_batches(
        [Document(text, np.ones(len(text), np.float32), number) for number, text in enumerate(texts)]
    )


def _spec(chosen: argparse.Namespace) -> Spec:
    return Spec.model_validate_json(
        json.dumps(
            {
                "method": "SFT",
                "model": {"source": chosen.model, "dtype": "bfloat16"},
                "data": {"train": [{"source": "/none.jsonl", "format": "Text"}], "maxLength": chosen.length},
                "parallelism": {"data": chosen.data, "expert": chosen.expert},
                "training": {
                    "maxSteps": chosen.steps,
                    "globalBatchSize": chosen.batch,
                    "precision": {"gradients": chosen.gradients, "moments": chosen.moments},
                    "recompute": {"granularity": chosen.recompute},
                },
                "memory": {"sharding": chosen.sharding},
                "storage": {"size": "1Gi"},
                "resources": {"gpuType": "H200"},
            }
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B")
    parser.add_argument("--sharding", default="DistributedOptimizer")
    parser.add_argument("--gradients", default="float32")
    parser.add_argument("--moments", default="float32")
    parser.add_argument("--recompute", default="None")
    for name, default in (("steps", 100), ("batch", 8), ("length", 2048), ("data", 2), ("expert", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
