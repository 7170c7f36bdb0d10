"""How near two computations of the same layer have to be, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bound:
    """What rounding may do. A wrong table or a wrong formula does a hundred times as much, to most tokens.

    relative: to what the layer adds to a token. rounding: to the sum, which is rounded once more.
    strays: the share of tokens that may differ all the same: where two experts score almost alike, rounding chooses.
    """

    relative: float
    rounding: float
    strays: float


_BOUNDS = {
    torch.float32: Bound(relative=1e-4, rounding=1e-6, strays=1 / 64),
    torch.bfloat16: Bound(relative=0.05, rounding=0.008, strays=1 / 4),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a part of the model is from its reference. `largest` is in units of what is allowed."""

    part: str
    # That are further from it than rounding explains, of how many, and how many of them are not held against it.
    strays: int
    tokens: int
    most_strays: float
    largest: float

    @property
    def differs(self) -> bool:
        """Whether the part computes something else."""
        return self.strays > self.most_strays

    def __str__(self) -> str:
        by = f"by up to {self.largest:.2g} times the rounding"
        return f"{self.part} ({self.strays} of {self.tokens} tokens differ, {by})"


def bound_of(dtype: torch.dtype) -> Bound:
    """The bound for weights of this type."""
    return _BOUNDS[dtype]


def of_states(part: str, ours: Tensor, theirs: Tensor, before: Tensor, bound: Bound) -> Comparison:
    """Between two results of one layer, given what went in. [t, h]"""
    ours, theirs, before = (one.double().cpu() for one in (ours, theirs, before))
    allowed = bound.relative * _length(theirs - before) + bound.rounding * _length(theirs)
    return _comparison(part, _length(ours - theirs), allowed, bound)


def of_logits(part: str, ours: tuple[Tensor, Tensor], logits: Tensor, labels: Tensor, bound: Bound) -> Comparison:
    """Between log-probability and entropy of labels, and theirs as their logits say them. [t], [t, v]"""
    theirs = logits.double().cpu().log_softmax(-1)
    said = theirs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(theirs.exp() * theirs).sum(-1)
    # Of the same rounding, large logits make more.
    allowed = bound.relative * (1 + logits.double().cpu().abs().amax(-1))
    apart = torch.stack([(one.double().cpu() - other).abs() for one, other in zip(ours, said, strict=True)])
    return _comparison(part, apart.amax(0), allowed, bound)


def _comparison(part: str, apart: Tensor, allowed: Tensor, bound: Bound) -> Comparison:
    # What is not a number is not within.
    strays = int((~(apart <= allowed)).sum())
    return Comparison(part, strays, len(apart), bound.strays * len(apart), float((apart / allowed).max()))


def _length(rows: Tensor) -> Tensor:
    return rows.square().sum(-1).sqrt()
