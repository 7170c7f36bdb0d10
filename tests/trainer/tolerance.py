"""Comparison of two tensors within a tolerance."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def assert_all_close(actual: Sequence[Tensor], expected: Sequence[Tensor], *, within: float) -> None:
    """In units of the largest element, if it is above one: rounding in a sum scales with what is summed."""
    assert len(actual) == len(expected)
    for place, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.shape == other.shape, f"tensor {place} has shape {one.shape}, not {other.shape}"
        if other.numel() == 0:
            continue
        error = (one.double() - other.double()).abs().max().item() / max(other.double().abs().max().item(), 1.0)
        assert error <= within, f"tensor {place} is off by {error}, more than {within}"
