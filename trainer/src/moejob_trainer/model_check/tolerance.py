"""Tolerances between two computations of the same layer, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The effect that rounding may have. A wrong table or formula has a hundred times as much, on most tokens.

    relative: to what the layer adds to a token. rounding: to the sum, which is rounded once more.
    logits: of log-probabilities and entropies, to the largest logit of a token.
    outliers: the share of tokens that may differ all the same: where two experts score almost alike, rounding chooses.
    """

    relative: float
    rounding: float
    logits: float
    outliers: float


_BOUNDS = {
    torch.float32: Tolerance(relative=1e-4, rounding=1e-6, logits=1e-4, outliers=1 / 64),
    torch.bfloat16: Tolerance(relative=0.05, rounding=0.008, logits=0.02, outliers=1 / 4),
}
# Rows of the vocabulary are copied, in every type and layout.
COPIED = Tolerance(relative=0.0, rounding=1e-6, logits=0.0, outliers=0.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The distance of a part of the model from its reference. `largest` is in units of the tolerance."""

    part: str
    # That are further from it than rounding explains, of how many, and how many of them are not held against it.
    outliers: int
    tokens: int
    most_outliers: float
    largest: float

    @property
    def differs(self) -> bool:
        """True when the part computes something else."""
        return self.outliers > self.most_outliers

    def __str__(self) -> str:
        by = f"by up to {self.largest:.2g} times the rounding"
        return f"{self.part} ({self.outliers} of {self.tokens} tokens differ, {by})"


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """The bound for weights of this type."""
    return _BOUNDS[dtype]


def of_states(part: str, ours: Tensor, theirs: Tensor, before: Tensor, bound: Tolerance) -> Comparison:
    """Between two results of one layer, given what went in. [t, h]"""
    ours, theirs, before = (one.double().cpu() for one in (ours, theirs, before))
    allowed = bound.relative * _length(theirs - before) + bound.rounding * _length(theirs)
    return _comparison(part, _length(ours - theirs), allowed, bound)


def of_logits(part: str, ours: tuple[Tensor, Tensor], logits: Tensor, labels: Tensor, bound: Tolerance) -> Comparison:
    """Between log-probability and entropy of labels, and theirs from their logits. [t], [t, v]"""
    theirs = logits.double().cpu().log_softmax(-1)
    expected = theirs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(theirs.exp() * theirs).sum(-1)
    # Of the same rounding, large logits make more.
    allowed = bound.logits * (1 + logits.double().cpu().abs().amax(-1))
    apart = torch.stack([(one.double().cpu() - other).abs() for one, other in zip(ours, expected, strict=True)])
    return _comparison(part, apart.amax(0), allowed, bound)


def _comparison(part: str, apart: Tensor, allowed: Tensor, bound: Tolerance) -> Comparison:
    # What is not a number is not within.
    outliers = int((~(apart <= allowed)).sum())
    return Comparison(part, outliers, len(apart), bound.outliers * len(apart), float((apart / allowed).max()))


def _length(rows: Tensor) -> Tensor:
    return rows.square().sum(-1).sqrt()
