"""The loss over a hundred steps of one shape with random weights, for ways of dividing state over replicas, and in FP8.

    torchrun --nproc-per-node 2 -m benchmarks.trainer.loss_curves --model Qwen/Qwen2.5-0.5B --sharding FSDP >> LOG
    torchrun --nproc-per-node 2 --max-restarts 1 -m benchmarks.trainer.loss_curves --micro 4 \\
        --sharding DistributedOptimizer FSDP >> LOG
    python -m benchmarks.trainer.loss_curves --data 1 --steps 300 --compute bfloat16 FP8 >> LOG

Texts are drawn from a language in which a word has few successors, so that there is something to learn; every run of
a shape sees the same. Prints one JSON line for each way as soon as its curve ends, and the distance of the others from
the first. `--most-seconds` ends a curve early.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.trainer.engines import Beginning, Started, loss, peak_gib, resources, stack, start_engine
from benchmarks.trainer.in_turn import Line, in_turn
from moejob_api.job import Spec
from moejob_api.job.training import ComputeType
from moejob_api.models import catalog
from moejob_trainer.training import Document, MicroBatch

# Words of the language, and how many may follow each: 5.5 bits a token at first, less than 2 for who knows them.
WORDS, SUCCESSORS = 2048, 4
LEARNING_RATE, WARM_UP_STEPS = 1e-4, 10
SHOWN_STEPS = 10


def main() -> None:
    """Trains and prints."""
    asked = _arguments()
    ways = [
        argparse.Namespace(**{**vars(asked), "sharding": sharding, "compute": compute})
        for sharding, compute in product(asked.sharding, asked.compute)
    ]
    names = [_name(way) for way in ways]
    lines = in_turn(names, lambda number, device: _curve(ways[number], device), asked.most_seconds + 120)
    curves = [losses for line in lines or [] if isinstance(losses := line.get("losses"), list)]
    for other in curves[1:]:
        print(json.dumps({"distance": distance(curves[0], other)}), flush=True)


def distance(first: Sequence[float], other: Sequence[float]) -> dict[str, object]:
    """Return how far two curves are from each other where both have steps, and at which of them the most."""
    apart = [abs(a - b) for a, b in zip(first, other, strict=False)]
    worst = max(range(len(apart)), key=apart.__getitem__)
    last = apart[-SHOWN_STEPS:]
    return {
        "steps": len(apart),
        "second": round(apart[min(1, len(apart) - 1)], 5),
        "largest": round(apart[worst], 5),
        "largestAtStep": worst + 1,
        "meanOfLast": round(sum(last) / len(last), 5),
    }


def _name(chosen: argparse.Namespace) -> str:
    return f"{chosen.sharding} {chosen.compute}"


def _curve(chosen: argparse.Namespace, device: torch.device) -> Line:
    progress = CurveTimer(_name(chosen), is_shown=dist.get_rank() == 0)
    config = dict(catalog.find_config(chosen.model) or {})
    config |= {} if chosen.layers is None else {"num_hidden_layers": chosen.layers}
    of_rank = start_engine(config, _spec(chosen, device), device, _rate, Beginning(progress.note_phase))
    losses: list[float] = []
    norms: list[float] = []
    for texts in _batches(chosen, of_rank.model.shape.vocabulary):
        of_rank.engine.begin_step(len(losses))
        result = of_rank.engine.update(_batch(of_rank, texts), loss)
        losses.append(round(result.loss, 5))
        norms.append(round(result.gradient_norm, 5))
        if len(losses) % SHOWN_STEPS in (1, 2):
            # Of a run that is cut off, too, one sees how far it came.
            progress.note_phase(f"step {len(losses)}: {losses[-1]}")
        if len(losses) % SHOWN_STEPS == 0 and _any_over(progress.seconds, chosen.most_seconds, device):
            break
    return {
        "curve": vars(chosen) | {"ranks": dist.get_world_size()},
        "losses": losses,
        "norms": norms,
        "seconds": round(progress.seconds, 1),
        "phases": progress.phases,
        "peakGiB": peak_gib(device),
        **stack(device),
    }


@dataclass(slots=True)
class CurveTimer:
    """The seconds since a curve was begun, shown on rank 0 as it comes along."""

    name: str
    is_shown: bool
    begun: float = field(default_factory=time.perf_counter)
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        return time.perf_counter() - self.begun

    def note_phase(self, what: str) -> None:
        """Note a phase."""
        self.phases[what.partition(":")[0]] = round(self.seconds, 1)
        if self.is_shown:
            print(f"{self.name}, {self.seconds:.1f} s: {what}", file=sys.stderr, flush=True)


def _any_over(seconds: float, most_seconds: float, device: torch.device) -> bool:
    """Return whether a rank has trained for too long; all ranks ask, and hear the same."""
    longest = torch.tensor(seconds, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item() > most_seconds


def _batches(chosen: argparse.Namespace, vocabulary: int) -> Iterator[list[np.ndarray]]:
    """Yield the texts of each step, the same for every way."""
    random = np.random.default_rng(1)
    words = random.choice(vocabulary, min(WORDS, vocabulary), replace=False)
    successors = random.integers(0, len(words), (len(words), SUCCESSORS))
    for _ in range(chosen.steps):
        yield [_text(random, words, successors, chosen.length) for _ in range(chosen.batch)]


def _rate(step: int) -> float:
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)


def _text(random: np.random.Generator, words: np.ndarray, successors: np.ndarray, most: int) -> np.ndarray:
    """Return the tokens of one text, from half of `most` on."""
    place, places = int(random.integers(0, len(words))), []
    for choice in random.integers(0, SUCCESSORS, int(random.integers(most // 2, most + 1))):
        places.append(place)
        place = int(successors[place, choice])
    found: np.ndarray = words[places]
    return found


def _batch(of_rank: Started, texts: list[np.ndarray]) -> list[MicroBatch]:
    return of_rank.micro_batches(
        [Document(text, np.ones(len(text), np.float32), number) for number, text in enumerate(texts)]
    )


def _spec(chosen: argparse.Namespace, device: torch.device) -> Spec:
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
                    "microBatchSize": chosen.micro,
                    "precision": {
                        "compute": ComputeType.FP8 if chosen.compute == ComputeType.FP8 else None,
                        "gradients": chosen.gradients,
                        "moments": chosen.moments,
                    },
                    "recompute": {"granularity": chosen.recompute},
                },
                "memory": {"sharding": chosen.sharding},
                "storage": {"size": "1Gi"},
                "resources": resources(device),
            }
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B")
    parser.add_argument("--sharding", nargs="+", default=["DistributedOptimizer"], help="one after the other")
    parser.add_argument("--compute", nargs="+", default=["bfloat16"], choices=["bfloat16", "FP8"])
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--most-seconds", type=float, default=600, help="of each curve")
    parser.add_argument("--gradients", default="float32")
    parser.add_argument("--moments", default="float32")
    parser.add_argument("--recompute", default="None")
    for name, default in (("steps", 100), ("batch", 8), ("micro", 1), ("length", 2048), ("data", 2), ("expert", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
