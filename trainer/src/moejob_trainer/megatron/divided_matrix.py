"""A matrix divided over replicas: gathered into the memory that products read, and its gradients summed over replicas.
from the memory that products wrote.

Each of r replicas keeps about e n k / r elements of a matrix [e, n, k], whole rows of k. torch's fully_shard would copy
weights and gradients once more, on the stream of the products. Knows nothing of layers and passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from moejob_trainer.distributed.collectives import PendingCollective, start_all_gather
from moejob_trainer.distributed.side_stream import Finish, SideStream
from moejob_trainer.megatron.replica_sums import ReplicaSums
from moejob_trainer.megatron.shares import ReplicaSharding


class DividedMatrix:
    """One matrix: the optimizer updates the parameter `share`; products read `whole` while that has memory."""

    def __init__(
        self, padded: Tensor, sharded: ReplicaSharding, *, is_trained: bool, peers: Sequence[Tensor] = ()
    ) -> None:
        """padded: memory of this rank's share, as long on every rank. peers: the shares of all ranks, if readable."""
        self.sharded, self._padded, self._peers = sharded, padded, peers
        local_part = padded[: sharded.stop - sharded.start]
        width = sharded.shape[-1]
        self.share = nn.Parameter(local_part.view(local_part.numel() // width, width), requires_grad=is_trained)
        self._gathered = padded.new_empty(sharded.group.size * sharded.each, dtype=sharded.dtype)
        self._bytes = self._gathered.nbytes
        # A second tensor in the same memory: autograd raises an error for a saved tensor that is written again.
        storage = self._gathered.untyped_storage()
        whole_view = self._gathered.new_empty(0).set_(storage, 0, sharded.shape, _contiguous_strides(sharded.shape))
        self.whole = nn.Parameter(whole_view, requires_grad=is_trained)
        self.free_whole()

    def start_gather(self, stream: SideStream) -> Finish:
        """Allocate the whole matrix, and start to fill it."""
        self._gathered.untyped_storage().resize_(self._bytes)
        return stream.start_exchange(self._fill_whole, _ignore_rows)

    def free_whole(self) -> None:
        """Keep the share alone."""
        self._gathered.untyped_storage().resize_(0)

    def _fill_whole(self) -> PendingCollective:
        if self._peers:
            return self._copy_from_peers()
        # Rounded before it travels: half the bytes.
        share = self._padded.to(self.sharded.dtype)
        if self.sharded.group.size > 1:
            return start_all_gather(share, self.sharded.group, self._gathered, is_async=not share.is_cuda)
        return PendingCollective(self._gathered.copy_(share), share, None)

    def _copy_from_peers(self) -> PendingCollective:
        """Copy the shares of all ranks: the copy engines of a GPU leave its multiprocessors to the products."""
        size, local_rank = self.sharded.group.size, self.sharded.group.rank
        parts = self._gathered.view(size, -1)
        # Each rank begins with itself and continues with the next: no two ranks read from the same rank at a time.
        for rank in (*range(local_rank, size), *range(local_rank)):
            parts[rank].copy_(self._peers[rank])
        return PendingCollective(self._gathered, self._padded, None)


class _LentGradient:
    """The gradient of one matrix in one micro batch. One product writes all of it, then replicas sum it."""

    is_new = True

    def __init__(self, matrix: DividedMatrix, sums: ReplicaSums) -> None:
        self._share, self._sharded, self._sums = matrix.share, matrix.sharded, sums
        self._lent: Tensor | None = None

    def target_for(self, weight: Tensor) -> Tensor:
        """Return memory for the gradient, in the shape in which the product has the weight."""
        self._lent = self._sums.lend_gradient(self._sharded.group.size * self._sharded.each)
        return self._lent[: self._sharded.elements].view(weight.shape)

    def mark_added(self, _: Tensor) -> None:
        """Start to sum it over replicas."""
        if self._lent is None:
            raise RuntimeError("a product has written a gradient that nothing was lent for; report this")
        if self._share.grad is None:
            raise RuntimeError("gradients of a divided parameter exist as long as it is trained")
        self._sums.send_gradient(self._lent, self._share.grad.view(-1))
        self._lent = None

    def sum_autograd_gradient(self, matrix: Tensor) -> None:
        """Sum a gradient that autograd computed itself, for a product that does not write into lent memory."""
        if matrix.grad is not None:
            self.target_for(matrix).copy_(matrix.grad)
            self.mark_added(matrix)
            matrix.grad = None


def register_replica_sum(matrix: DividedMatrix, sums: ReplicaSums) -> None:
    """Sum gradients of the whole matrix over replicas, whether a product or autograd computes them."""
    lent = _LentGradient(matrix, sums)
    matrix.whole.gradient_sum = lent  # type: ignore[attr-defined]
    matrix.whole.register_post_accumulate_grad_hook(lent.sum_autograd_gradient)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _ignore_rows(_: Tensor) -> None:
    """Ignore gathered rows: they already lie in the matrix."""
