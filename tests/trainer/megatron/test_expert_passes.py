"""Meetings of replicas that read one another's shares: around every pass."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from moejob_trainer.distributed.groups import ALONE
from moejob_trainer.distributed.side_stream import Finish, SideStream
from moejob_trainer.megatron.divided_matrix import DividedMatrix
from moejob_trainer.megatron.expert_shares import DividedExperts, ExpertShares
from moejob_trainer.megatron.replica_sums import GradientMemory, ReplicaSums
from moejob_trainer.megatron.shares import ReplicaSharding
from moejob_trainer.model.moe_layer import LocalExperts

CPU = torch.device("cpu")


class Layer(nn.Module):
    """The experts of a layer: one number."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[1, 1] -> [1, 1]"""
        return x @ self.down


class Recorded(DividedMatrix):
    """A matrix that says when it is gathered."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(torch.ones(1), ReplicaSharding((1, 1), torch.float32, ALONE, 1), is_trained=False)
        self.events = events

    def start_gather(self, stream: SideStream) -> Finish:
        self.events.append("gather")
        return super().start_gather(stream)


def test_replicas_meet_before_the_first_gather_of_a_pass_and_behind_its_last() -> None:
    events: list[str] = []
    modules = [Layer() for _ in range(3)]
    layers = [DividedExperts(cast("LocalExperts", module), {"down": Recorded(events)}) for module in modules]
    sums = ReplicaSums(ALONE, SideStream(CPU), GradientMemory(torch.float32, CPU, 2))
    shares = ExpertShares(layers, sums, SideStream(CPU), lambda: events.append("meet"))
    stage = nn.Sequential(*modules)
    shares.register_hooks(stage)
    for _ in range(2):
        stage(torch.ones(1, 1, requires_grad=True)).backward()
        shares.free_layers()
        # Nothing was read since.
        shares.free_layers()
    of_a_pass = ["meet", *["gather"] * 4, "meet"]
    assert events == 2 * of_a_pass
