"""Rows of ranks that have another number each: gathered, and summed into shares, with their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moejob_trainer.distributed.collectives import all_gather_uneven, reduce_scatter_uneven
from moejob_trainer.distributed.groups import Group
from trainer.worlds import Worlds

WIDTH = 3
COUNTS = {2: (2, 3), 3: (4, 0, 1), 4: (0, 0, 5, 2)}


@pytest.mark.parametrize("ranks", [1, *COUNTS])
def test_all_rows_are_gathered_and_their_gradients_summed(worlds: Worlds, ranks: int) -> None:
    everyones = torch.cat([rows(rank, ranks) for rank in range(ranks)])
    for rank, (gathered, gradient) in enumerate(worlds.run(ranks, gathered_with_gradient)):
        assert torch.equal(gathered, everyones)
        # Each rank weighs the rows by a number of its own.
        weights = sum(range(1, ranks + 1))
        assert torch.equal(gradient, torch.full_like(rows(rank, ranks), weights))


@pytest.mark.parametrize("ranks", [1, *COUNTS])
def test_shares_are_sums_and_their_gradients_reach_all_ranks(worlds: Worlds, ranks: int) -> None:
    total = sum(range(1, ranks + 1))
    for rank, (share, gradient) in enumerate(worlds.run(ranks, summed_with_gradient)):
        torch.testing.assert_close(share, total * rows(rank, ranks))
        upstream = torch.cat([rows(other, ranks) for other in range(ranks)])
        torch.testing.assert_close(gradient, (rank + 1) * upstream)


def rows(rank: int, ranks: int) -> Tensor:
    """Those of one rank, unlike all others."""
    count = COUNTS.get(ranks, (2,))[rank]
    return torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH) + 100 * rank + 1


def gathered_with_gradient() -> tuple[Tensor, Tensor]:
    """One rank's part."""
    group = _group()
    own = rows(group.rank, group.size).requires_grad_()
    gathered = all_gather_uneven(own, COUNTS.get(group.size, (2,)), group)
    gathered.backward(torch.full_like(gathered, group.rank + 1))
    assert own.grad is not None
    return gathered.detach(), own.grad


def summed_with_gradient() -> tuple[Tensor, Tensor]:
    """One rank's part: what it adds is the rows of all, times a number of its own."""
    group = _group()
    everyones = torch.cat([rows(rank, group.size) for rank in range(group.size)]).requires_grad_()
    share = reduce_scatter_uneven(everyones * (group.rank + 1), COUNTS.get(group.size, (2,)), group)
    share.backward(rows(group.rank, group.size))
    assert everyones.grad is not None
    return share.detach(), everyones.grad


def _group() -> Group:
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
