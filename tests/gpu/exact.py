"""Kernels that count and cut beside their plain twins: the same numbers, not only near ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moejob_trainer.layers import permutation, routing


def order(device: str, kernels: Any, tokens: int, per_token: int, experts: int) -> None:
    """Choices of none are among them."""
    chosen = torch.rand(tokens, experts + 1, device=device).argsort(1)[:, :per_token]
    assert kernels.orders(chosen, experts)
    ordered, plain = kernels.ordered(chosen, experts), permutation.plain_ordered(chosen, experts)
    for one, other in zip(ordered, plain, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def counts(device: str, kernels: Any, tokens: int, per_token: int, experts: int) -> None:
    """With and without documents, and of all tokens or of some."""
    chosen = torch.rand(tokens, experts + 1, device=device).argsort(1)[:, :per_token]
    segments = torch.arange(tokens, device=device, dtype=torch.int32) * 3 // max(tokens, 1)
    some = torch.rand(tokens, device=device) < 0.7
    for counted in (None, some):
        for documents, of in ((1, None), (3, segments)):
            found = kernels.document_counts(chosen, of, documents, experts, counted)
            assert torch.equal(found, routing.plain_document_counts(chosen, of, documents, experts, counted))


def entropies(device: str, kernels: Any, tokens: int, experts: int) -> None:
    """Sums of float32 numbers, in another order."""
    logits = torch.randn(tokens, experts, device=device) * 3
    # Shares of zero have no logarithm.
    logits[::2, 0] = -300.0
    some = torch.rand(tokens, device=device) < 0.7
    for counted in (None, some):
        for scoring in (routing.Scoring.SOFTMAX, routing.Scoring.SIGMOID):
            of = routing.Routing(experts, 1, scoring, dtype=torch.float64)
            exact = routing.plain_entropies(logits.double(), of, counted).sum().item()
            sums = kernels.entropy_sums(logits, counted, of_sigmoids=scoring is routing.Scoring.SIGMOID)
            assert abs(sums.sum().item() - exact) <= 1e-5 * max(exact, 1.0)


def parts(device: str, kernels: Any, tokens: int, experts: int) -> None:
    """Of numbers far and near: the three parts are the number, to the last of its bits but one."""
    gradient = torch.randn(tokens, experts, device=device) * 10.0 ** torch.randint(-12, 12, (tokens, 1), device=device)
    cut = kernels.parts(gradient)
    assert cut.dtype is torch.bfloat16
    whole = cut.double().view(tokens, 3, experts).sum(1)
    assert ((whole - gradient).abs() <= gradient.abs().double() * 2.0**-23).all()


CHECKS: dict[str, tuple[str, Callable[..., None]]] = {
    "order": ("permutation", order),
    "counts": ("routing", counts),
    "entropies": ("routing", entropies),
    "parts": ("routing", parts),
}
