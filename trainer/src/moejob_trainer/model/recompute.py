"""Activation recomputation: some outputs are not kept for the backward pass but computed again.

Which whole layers is decided here; which modules of a layer in moejob_api.derived, as layer.py asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moejob_api.job.training import Recompute, RecomputeGranularity, RecomputeMethod
from moejob_trainer.model.adapters import dropout_key

R = TypeVar("R")

_is_recomputing: ContextVar[bool] = ContextVar("_is_recomputing", default=False)
# The storages that will be discarded as soon as they have been used.
_discarded: ContextVar[frozenset[int]] = ContextVar("_discarded", default=frozenset())


def _keep_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


# The way in which a tensor is kept between the passes: it returns what gives it back.
keeping: ContextVar[Callable[[Tensor], Callable[[], Tensor]]] = ContextVar("keeping", default=_keep_tensor)


def recomputed_groups(recompute: Recompute, layers: int) -> list[tuple[range, bool]]:
    """The layers of a stage in groups, each with whether it is computed again as a whole."""
    if recompute.granularity is not RecomputeGranularity.FULL:
        return [(range(layers), False)]
    size = recompute.layers or 1
    if recompute.method is RecomputeMethod.BLOCK:
        first = min(size, layers)
        return [(range(index, index + 1), index < first) for index in range(layers)]
    return [(range(start, min(start + size, layers)), True) for start in range(0, layers, size)]


def maybe_recompute(is_recomputed: bool, compute: Callable[..., R], *arguments: Any) -> R:
    """Compute a result; if it is to be recomputed, keep nothing but the arguments for the backward pass."""
    if not is_recomputed or not torch.is_grad_enabled():
        return compute(*arguments)
    # Nothing in a layer is random but the dropout of adapters, whose masks come from generators of their own.
    contexts = partial(_recompute_contexts, dropout_key.get())
    result: R = checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return result


def maybe_discard(
    is_forgotten: bool,
    make: Callable[..., Tensor],
    use: Callable[[Tensor], Tensor],
    *arguments: Tensor,
    remake: Callable[..., object] | None = None,
) -> Tensor:
    """Compute use(make(*arguments)), freeing the output of `make` between the passes: the backward pass remakes it.

    The output has to be cheap, and share no memory with the arguments. Checkpointing `make` alone would free nothing:
    the matrices in `use` keep their input. `again(into, *arguments)` remakes it in place; without, it is copied.
    """
    output = make(*arguments)
    if not is_forgotten:
        return use(output)
    token = _discarded.set(_discarded.get() | {storage_address(output)})
    try:
        result = use(output)
    finally:
        _discarded.reset(token)
    if result.requires_grad:
        output.untyped_storage().resize_(0)
        saved_arguments = [keeping.get()(argument) for argument in arguments]
        # Whatever looks at it in the backward pass comes behind the result's gradient.
        result.register_hook(_RemakeHook(output.detach(), remake or partial(_make_and_copy, make), saved_arguments))
    return result


def is_discarded(address: int) -> bool:
    """Return whether what lies in this storage will be discarded: it need not be kept elsewhere."""
    return address in _discarded.get()


def storage_address(tensor: Tensor) -> int:
    """Return the address that all views of a tensor share, and no other tensor has while any of them lives."""
    storage: Any = tensor.untyped_storage()
    address: int = storage._cdata  # noqa: SLF001 the only name that views of a tensor share
    return address


class _RemakeHook:
    """The hook that fills the memory of what was discarded, once.

    Hooks live as long as the whole graph, and autograd frees what a node kept as soon as the node is done: a hook that
    held on to it would keep what all layers made until the end of the backward pass.
    """

    def __init__(
        self, output: Tensor, remake: Callable[..., object], saved_arguments: Sequence[Callable[[], Tensor]]
    ) -> None:
        self._todo: tuple[Tensor, Callable[..., object], Sequence[Callable[[], Tensor]]] | None = (
            output,
            remake,
            saved_arguments,
        )

    def __call__(self, _: Tensor) -> None:
        if self._todo is None:
            return
        (output, remake, saved_arguments), self._todo = self._todo, None
        storage = output.untyped_storage()
        storage.resize_(output.nbytes)
        # Another tensor in the same memory: autograd would take one of its own that was written to for a mistake.
        target = output.new_empty(0).set_(storage, 0, output.shape, output.stride())
        with torch.no_grad():
            remake(target, *[argument() for argument in saved_arguments])


def _make_and_copy(make: Callable[..., Tensor], target: Tensor, *arguments: Tensor) -> None:
    target.copy_(make(*arguments))


def is_recomputing() -> bool:
    """Return whether this is the second time: counters must count the first time only."""
    return _is_recomputing.get()


def _recompute_contexts(
    dropout_numbers: tuple[int, int],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _recomputing(dropout_numbers)


@contextmanager
def _recomputing(dropout_numbers: tuple[int, int]) -> Iterator[None]:
    token, masks = _is_recomputing.set(True), dropout_key.set(dropout_numbers)
    try:
        yield
    finally:
        dropout_key.reset(masks)
        _is_recomputing.reset(token)
