"""Matrices of which every replica keeps a share: what is gathered, and what is summed into the shares."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpu.twins import bounds_of
from moejob_trainer.distributed.groups import ALONE, Group
from moejob_trainer.distributed.peer_memory import PeerMemory
from moejob_trainer.distributed.side_stream import SideStream
from moejob_trainer.layers.experts import grouped_linear
from moejob_trainer.layers.gradient_sums import find_gradient_sum
from moejob_trainer.megatron.divided_matrix import DividedMatrix, register_replica_sum
from moejob_trainer.megatron.replica_sums import GradientMemory, PeerGradientMemory, ReplicaSums
from moejob_trainer.megatron.share_memory import ShareMemory, make_share_memory
from moejob_trainer.megatron.shares import ReplicaSharding, local_part, share_elements
from trainer.worlds import Worlds

CPU = torch.device("cpu")
BOUNDS = bounds_of([3, 0])
# Two experts of three rows: four ranks have two, two, two and none, five ranks have fewer still.
SHAPE = (2, 3, 8)
MICRO_BATCHES = 5
MOST = 2
READ = pytest.mark.parametrize("are_read", [False, True], ids=["sent", "read by peers"])


def _group() -> Group:
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD) if dist.is_initialized() else ALONE


def _values() -> Tensor:
    return torch.arange(1.0, 49.0).view(SHAPE)


def _divided(
    group: Group,
    computes: torch.dtype = torch.float32,
    memory: ShareMemory | None = None,
    *,
    are_read: bool = False,
) -> tuple[DividedMatrix, ReplicaSums]:
    sharded = ReplicaSharding(SHAPE, computes, group, share_elements(SHAPE, group))
    padded, peers = (memory or ShareMemory(None, CPU)).take_share(sharded.each, torch.float32)
    matrix = DividedMatrix(padded, sharded, is_trained=True, peers=peers)
    local_part(matrix.share).copy_(_values().flatten()[sharded.start : sharded.stop])
    matrix.share.grad = torch.zeros_like(matrix.share)
    sums = ReplicaSums(group, SideStream(CPU), _gradient_memory(group, sharded.each * group.size, are_read=are_read))
    register_replica_sum(matrix, sums)
    return matrix, sums


def _gradient_memory(group: Group, elements: int, *, are_read: bool) -> GradientMemory:
    if not are_read:
        return GradientMemory(torch.float32, CPU, MOST)
    memory = make_share_memory([elements] * MOST, torch.float32, group, CPU)
    return PeerGradientMemory(memory, torch.float32, CPU, MOST)


def _rows(rank: int, micro_batch: int) -> Tensor:
    return torch.randn((3, 8), generator=torch.Generator().manual_seed(100 * rank + micro_batch))


@READ
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_a_matrix_is_the_same_on_all_replicas_each_time_that_it_is_gathered(
    worlds: Worlds, ranks: int, are_read: bool
) -> None:
    assert worlds.run(ranks, gathered_twice, are_read) == [True] * ranks


def gathered_twice(are_read: bool) -> bool:
    """Return whether the matrix was whole after each gather, and without memory between them."""
    group = _group()
    each = share_elements(SHAPE, group)
    memory = make_share_memory([5, each], torch.float32, group, CPU) if are_read else ShareMemory(None, CPU)
    # Another share lies before it.
    memory.take_share(5, torch.float32)
    matrix, _ = _divided(group, memory=memory)
    stream, found = SideStream(CPU), []
    for times in (1, 2):
        _wait_for(memory)
        local_part(matrix.share).copy_(local_part(matrix.share) * times)
        _wait_for(memory)
        matrix.start_gather(stream)()
        found.append(torch.equal(matrix.whole.detach(), _values() * times))
        matrix.free_whole()
        found.append(matrix.whole.untyped_storage().nbytes() == 0)
    return all(found)


def _wait_for(memory: ShareMemory) -> None:
    if memory.barrier is not None:
        memory.barrier()


def test_shares_with_more_bits_are_rounded_when_they_are_gathered(worlds: Worlds) -> None:
    assert worlds.run(2, gathered_in_bfloat16) == [True] * 2


def gathered_in_bfloat16() -> bool:
    """Return whether the whole matrix is the share, rounded."""
    matrix, _ = _divided(_group(), torch.bfloat16)
    local_part(matrix.share).add_(0.001)
    matrix.start_gather(SideStream(CPU))()
    return torch.equal(matrix.whole.detach(), (_values() + 0.001).to(torch.bfloat16))


@READ
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_shares_have_the_gradients_of_all_micro_batches_and_replicas(
    worlds: Worlds, ranks: int, are_read: bool
) -> None:
    for found, expected in worlds.run(ranks, summed_and_expected, are_read):
        torch.testing.assert_close(found, expected)


def summed_and_expected(are_read: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of this rank's share, and the same range of what autograd makes in one process."""
    group = _group()
    matrix, sums = _divided(group, are_read=are_read)
    stream = SideStream(CPU)
    for number in range(MICRO_BATCHES):
        matrix.start_gather(stream)()
        product = grouped_linear(_rows(group.rank, number), matrix.whole, BOUNDS, total=find_gradient_sum(matrix.whole))
        (product**2).sum().backward()
        matrix.free_whole()
    sums.finish_sums()
    weight = _values().requires_grad_()
    for rank in range(group.size):
        for number in range(MICRO_BATCHES):
            (grouped_linear(_rows(rank, number), weight, BOUNDS) ** 2).sum().backward()
    assert weight.grad is not None
    assert matrix.share.grad is not None
    sharded = matrix.sharded
    return local_part(matrix.share.grad).clone(), weight.grad.flatten()[sharded.start : sharded.stop].clone()


def test_a_gradient_of_autograd_is_summed_beside_that_of_a_product(worlds: Worlds) -> None:
    for found in worlds.run(2, summed_of_both_kinds):
        # The product's is three for the first expert alone, autograd's two everywhere, both twice.
        expected = torch.cat([torch.full((24,), 10.0), torch.full((24,), 4.0)])
        assert torch.equal(found, 2 * expected)


def summed_of_both_kinds() -> Tensor:
    """Return the gradients of all shares."""
    group = _group()
    matrix, sums = _divided(group)
    matrix.start_gather(SideStream(CPU))()
    for _ in range(2):
        product = grouped_linear(torch.ones(3, 8), matrix.whole, BOUNDS, total=find_gradient_sum(matrix.whole))
        product.sum().backward()
        (2 * matrix.whole).sum().backward()
    sums.finish_sums()
    assert matrix.share.grad is not None
    everyones = [torch.empty(24) for _ in range(group.size)]
    dist.all_gather(everyones, local_part(matrix.share.grad).clone())
    return torch.cat(everyones)


@READ
def test_two_gradients_of_a_size_are_on_their_way_at_most(worlds: Worlds, are_read: bool) -> None:
    assert worlds.run(2, memory_lent, are_read) == [MOST, MOST]


def memory_lent(are_read: bool) -> int:
    """Return how many places in memory six gradients have had."""
    group = _group()
    sums = ReplicaSums(group, SideStream(CPU), _gradient_memory(group, 8, are_read=are_read))
    places, total = [], torch.zeros(4)
    for number in range(6):
        lent = sums.lend_gradient(8)
        places.append(lent.data_ptr())
        sums.send_gradient(lent.fill_(1.0), total)
        if are_read and number == 2:
            sums.finish_sums()
    sums.finish_sums()
    assert total.tolist() == [12.0] * 4
    return len({*places})


def test_rows_are_read_between_two_meetings_of_all_replicas() -> None:
    own, other = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    meetings: list[float] = []

    def meet() -> None:
        # The other replica has its gradient at the first one, and writes another behind the second.
        meetings.append(3.0 if not meetings else torch.nan)
        other.view(torch.float32).fill_(meetings[-1])

    memory = ShareMemory(PeerMemory(0, (own, other), meet), CPU)
    gradients = PeerGradientMemory(memory, torch.float32, CPU, MOST)
    total = torch.full((4,), 5.0)
    gradients.start_sum(total, gradients.allocate_gradient(8).fill_(1.0), Group(0, 2), SideStream(CPU))()
    assert total.tolist() == [9.0] * 4
    assert len(meetings) == 2
