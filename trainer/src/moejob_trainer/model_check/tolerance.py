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
    def is_different(self) -> bool:
        """True when the part computes something else."""
        return self.outliers > self.most_outliers

    def __str__(self) -> str:
        by = f"by up to {self.largest:.2g} times the rounding"
        return f"{self.part} ({self.outliers} of {self.tokens} tokens differ, {by})"


def find_tolerance(dtype: torch.dtype) -> Tolerance:
    """The bound for weights of this type."""
    return _BOUNDS[dtype]


def compare_states(part: str, output: Tensor, expected: Tensor, before: Tensor, bound: Tolerance) -> Comparison:
    """Between two results of one layer, given what went in. [t, h]"""
    output, expected, before = (tensor.double().cpu() for tensor in (output, expected, before))
    allowed = bound.relative * _row_norms(expected - before) + bound.rounding * _row_norms(expected)
    return _make_comparison(part, _row_norms(output - expected), allowed, bound)


def compare_logits(
    part: str, output: tuple[Tensor, Tensor], logits: Tensor, labels: Tensor, bound: Tolerance
) -> Comparison:
    """Between log-probability and entropy of labels, and theirs from their logits. [t], [t, v]"""
    log_probabilities = logits.double().cpu().log_softmax(-1)
    expected = (
        log_probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
        -(log_probabilities.exp() * log_probabilities).sum(-1),
    )
    # Of the same rounding, large logits make more.
    allowed = bound.logits * (1 + logits.double().cpu().abs().amax(-1))
    distances = torch.stack(
        [(value.double().cpu() - expected_value).abs() for value, expected_value in zip(output, expected, strict=True)]
    )
    return _make_comparison(part, distances.amax(0), allowed, bound)


def _make_comparison(part: str, distances: Tensor, allowed: Tensor, bound: Tolerance) -> Comparison:
    # What is not a number is not within.
    outliers = int((~(distances <= allowed)).sum())
    return Comparison(
        part, outliers, len(distances), bound.outliers * len(distances), float((distances / allowed).max())
    )


def _row_norms(rows: Tensor) -> Tensor:
    return rows.square().sum(-1).sqrt()
