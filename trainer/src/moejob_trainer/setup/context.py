"""This rank among the others: the environment it was started with, its groups and its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter

from moejob_api.job import Spec
from moejob_api.layout.sizes import Layout, derive_layout
from moejob_trainer.checkpoints.saving import GlooCoordinator
from moejob_trainer.distributed.coordination import run_on_first_rank
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import start_groups
from moejob_trainer.megatron.training_engine import TrainingPlacement
from moejob_trainer.runtime.devices import new_control_group, start_device
from moejob_trainer.runtime.disk import explain_failure
from moejob_trainer.runtime.environment import RankEnvironment
from moejob_trainer.runtime.heartbeats import Heartbeat
from moejob_trainer.runtime.stopping import AgreedStop

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankContext:
    """This rank among the others, with its layout and its device."""

    environment: RankEnvironment
    layout: Layout
    placement: TrainingPlacement
    heartbeat: Heartbeat
    stop: AgreedStop

    @property
    def spec(self) -> Spec:
        """The job."""
        return self.environment.spec

    @property
    def node(self) -> int:
        """The number of this rank's pod."""
        return self.environment.rank // self.environment.ranks_per_node

    @property
    def groups(self) -> Groups:
        """The groups of this rank."""
        return self.placement.groups

    @property
    def control(self) -> dist.ProcessGroup:
        """The group of all ranks, for small messages and decisions."""
        if self.placement.control is None:
            raise RuntimeError("ranks of a run always have a control group")
        return self.placement.control

    @property
    def ranks(self) -> GlooCoordinator:
        """All ranks, for decisions that they take together."""
        return GlooCoordinator(self.control)

    def on_first_rank(self, act: Callable[[], T], kind: TypeAdapter[T]) -> T:
        """Act on the first rank only and return its result on all; its failure is raised on all."""

        def act_explained() -> T:
            with explain_failure("preparing the run", self.environment.folder):
                return act()

        return run_on_first_rank(self.ranks, act_explained, kind)


@contextmanager
def join_ranks(environment: RankEnvironment, heartbeat: Heartbeat) -> Iterator[RankContext]:
    """Join the ranks of the run, and leave them at the end."""
    device = start_device(environment)
    if device.type == "cpu":
        # Megatron makes tensors on a GPU by itself: from here on its modules see the CPU.
        use_cpu()
    sizes = derive_layout(environment.spec.parallelism, environment.spec.resources.gpus_per_node)
    groups = start_groups(sizes, environment.spec.moe.dispatcher)
    control = new_control_group()
    placement = TrainingPlacement(groups, device, control)
    yield RankContext(environment, sizes, placement, heartbeat, AgreedStop(control))
    dist.destroy_process_group()
