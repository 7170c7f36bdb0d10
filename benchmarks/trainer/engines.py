"""An engine with random weights on the GPUs of this machine, as the benchmarks of training measure it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moejob_api.job import Spec
from moejob_api.layout.sizes import Layout
from moejob_api.layout.sizes import layout as layout_of
from moejob_trainer.data.packing import batch_plan, global_batch
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.engine import Document, LossTerms, MicroBatch, TokenOutputs
from moejob_trainer.megatron.engine import EnginePlacement, MegatronEngine
from moejob_trainer.megatron.stages import built
from moejob_trainer.megatron.topology import start_groups
from moejob_trainer.megatron.weights import initialise
from moejob_trainer.model.architecture import Architecture, architecture
from moejob_trainer.model.parameters import parameters
from moejob_trainer.model.stage import Stage
from moejob_trainer.objectives.losses import cross_entropy


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """The engine of one rank and what it was made of."""

    engine: MegatronEngine
    model: Architecture
    spec: Spec
    sizes: Layout
    groups: Groups

    def batch(self, lengths: Sequence[int], random: np.random.Generator) -> list[MicroBatch]:
        """This rank's micro batches of random documents of these lengths."""
        return self.micro_batches(
            [
                Document(random.integers(0, self.model.shape.vocabulary, length), np.ones(length, np.float32), n)
                for n, length in enumerate(lengths)
            ]
        )

    def micro_batches(self, documents: Sequence[Document]) -> list[MicroBatch]:
        """This rank's micro batches of a global batch."""
        return global_batch(documents, batch_plan(self.spec, self.sizes, 0))[self.groups.data.rank]


def started(
    config: Mapping[str, Any],
    spec: Spec,
    device: torch.device,
    rate: Callable[[int], float] = lambda _: 1e-5,
    *,
    alike: bool = False,
) -> Started:
    """The engine of a job for a model with this config.json; `rate` returns the learning rate of an update.

    alike: the model is the same however it is divided, which takes longer.
    """
    model, sizes = architecture(config), layout_of(spec.parallelism, 8)
    groups = start_groups(sizes)
    stages = built(model, spec, sizes, groups, device)
    if alike:
        initialise(stages, parameters(model.shape), groups, seed=1, device=device)
    else:
        _fill(stages)
    engine = MegatronEngine(model, spec, stages, EnginePlacement(groups, device), rate)
    return Started(engine, model, spec, sizes, groups)


def _fill(stages: Sequence[Stage]) -> None:
    """Fill each rank's part with the same numbers: replicas begin alike, and it takes no time."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
            held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            held.fill_(1.0) if "norm" in name else held.normal_(std=0.02)


def joined() -> torch.device:
    """Join the ranks that torchrun started, or be alone. This rank's GPU."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def loss(outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
    """Return what supervised fine-tuning learns from."""
    return LossTerms(cross_entropy(outputs.log_probabilities, batch.weights))
