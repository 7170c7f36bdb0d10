"""Trains the tiny model for a few steps on one device and prints what it found; a process of its own for each device.

python tests/gpu/training.py cuda bfloat16 '{"offloadOptimizer": 0.5}' '{"compute": "FP8"}' Megatron '{"head_dim": 64}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "trainer" / "src"), str(ROOT / "crds" / "src")]

import numpy as np  # noqa: E402 the trainer may lie there unpacked
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from moejob_api.job import Spec  # noqa: E402
from moejob_api.layout.sizes import derive_layout as layout_of  # noqa: E402
from moejob_api.models import catalog  # noqa: E402
from moejob_trainer.data.packing import batch_plan, build_global_batch  # noqa: E402
from moejob_trainer.layers import routing  # noqa: E402
from moejob_trainer.megatron.cpu import use_cpu  # noqa: E402
from moejob_trainer.megatron.topology import start_groups  # noqa: E402
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine, TrainingPlacement  # noqa: E402
from moejob_trainer.megatron.weights import initialise_weights  # noqa: E402
from moejob_trainer.model.architecture import read_architecture  # noqa: E402
from moejob_trainer.model.parameters import model_parameters  # noqa: E402
from moejob_trainer.objectives.losses import cross_entropy  # noqa: E402
from moejob_trainer.setup.training_engine import build_model_stages  # noqa: E402
from moejob_trainer.training import Document, LossTerms, MicroBatch, TokenOutputs  # noqa: E402

STEPS = 8
# With these weights no token comes near a tie of two experts, which the order of additions would decide.
SEED = 17


def main(
    device: str,
    dtype: str,
    memory: Mapping[str, object],
    precision: Mapping[str, object],
    implementation: str,
    changes: Mapping[str, object],
) -> None:
    """Trains and prints losses, gradient norms, and on a CPU how far from a tie each layer's tokens were, as JSON."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cpu":
        use_cpu()
    config = {**(catalog.find_config("moejob/tiny-moe") or {}), **changes}
    model = read_architecture(config)
    spec = make_job(dtype, device, memory=memory, precision=precision, implementation=implementation)
    layout = layout_of(spec.parallelism, 8)
    groups = start_groups(layout, spec.moe.dispatcher)
    placement = TrainingPlacement(groups, torch.device(device))
    stages = build_model_stages(config, model, spec, layout, placement)
    initialise_weights(stages, model_parameters(model.shape), groups, SEED)
    engine = MegatronTrainingEngine(model, spec, stages, placement, lambda _: 2e-3)
    with distances_from_ties() as distances:
        results = [engine.update(global_batches(step, spec)[0], loss) for step in range(STEPS)]
    found = {"losses": [r.loss for r in results], "norms": [r.gradient_norm for r in results], "distances": distances}
    print(json.dumps(found))  # noqa: T201
    dist.destroy_process_group()


@contextmanager
def distances_from_ties() -> Iterator[list[float]]:
    """The token nearest to a tie, each time that torch's operations choose: how far the next expert is behind."""
    distances: list[float] = []
    plain = routing.plain_route_tokens

    def watched(logits: Tensor, of: routing.Routing, **more: Tensor | None) -> tuple[Tensor, Tensor]:
        largest = logits.detach().topk(of.per_token + 1).values
        distances.append((largest[:, -2] - largest[:, -1]).min().item())
        return plain(logits, of, **more)

    with patch.object(routing, "plain_route_tokens", watched):
        yield distances


def loss(outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
    """Return what supervised fine-tuning learns from."""
    return LossTerms(cross_entropy(outputs.log_probabilities, batch.weights))


def global_batches(step: int, spec: Spec) -> list[list[MicroBatch]]:
    """The micro batches of every data rank."""
    # The same few documents again and again: a model that learns is seen to.
    random = np.random.default_rng(step % 2)
    documents = [
        Document(random.integers(0, 500, length), np.ones(length, np.float32), number)
        for number, length in enumerate((120, 33, 7, 200, 64, 90, 15, 180))
    ]
    return build_global_batch(documents, batch_plan(spec, layout_of(spec.parallelism, 8), 0))


def make_job(
    dtype: str,
    device: str,
    parallelism: Mapping[str, object] | None = None,
    memory: Mapping[str, object] | None = None,
    moe: Mapping[str, object] | None = None,
    precision: Mapping[str, object] | None = None,
    implementation: str = "Native",
) -> Spec:
    """The job that is trained here."""
    return Spec.model_validate_json(
        json.dumps(
            {
                "method": "SFT",
                "model": {"source": "moejob/tiny-moe", "dtype": dtype, "implementation": implementation},
                "data": {"train": [{"source": "moejob/tiny-chats", "format": "Chat"}], "maxLength": 256},
                "parallelism": dict(parallelism or {}),
                "memory": dict(memory or {}),
                "training": {
                    "maxSteps": STEPS,
                    "globalBatchSize": 4,
                    "microBatchSize": 2,
                    "precision": dict(precision or {}),
                },
                "moe": {"balancing": "None", **(moe or {})},
                "storage": {"size": "1Gi"},
                "resources": {"accelerator": "GPU" if device == "cuda" else "CPU"},
            }
        )
    )


if __name__ == "__main__":
    device, dtype, memory, precision, implementation, changes = sys.argv[1:]
    main(device, dtype, json.loads(memory), json.loads(precision), implementation, json.loads(changes))
