"""Kernels that count and cut beside their plain twins: the same numbers, not only near ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moejob_trainer.layers import destinations, norm, permutation, routing


def order(device: str, kernels: Any, tokens: int, per_token: int, experts: int) -> None:
    """Choices of none are among them."""
    chosen = torch.rand(tokens, experts + 1, device=device).argsort(1)[:, :per_token]
    assert kernels.can_order(chosen, experts)
    ordered, plain = kernels.order_choices(chosen, experts), permutation.plain_order_choices(chosen, experts)
    for one, other in zip(ordered, plain, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def sent(device: str, kernels: Any, tokens: int, per_token: int, experts: int, ranks: int) -> None:
    """Destinations of choices, of which some are none, and what travels to them."""
    chosen = torch.rand(tokens, experts * ranks + 1, device=device).argsort(1)[:, :per_token]
    found, plain = (
        kernels.find_destinations(chosen, experts, ranks),
        destinations.plain_destinations(chosen, experts, ranks),
    )
    for one, other in zip(found, plain, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    order, _, _ = permutation.plain_order_choices(found[0], ranks)
    order = order[: int(found[1][0].sum())]
    for dtype in (torch.float32, torch.float64):
        weights = torch.rand(tokens, per_token, device=device, dtype=dtype)
        both = kernels.pack_choices(chosen, weights, order, experts)
        assert both.dtype is dtype
        assert torch.equal(both, destinations.plain_pack_choices(chosen, weights, order, experts))


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
            smallest = routing.SMALLEST_SUM if scoring is routing.Scoring.SIGMOID else None
            sums = kernels.entropy_sums(logits, counted, smallest=smallest)
            assert abs(sums.sum().item() - exact) <= 1e-5 * max(exact, 1.0)


def parts(device: str, kernels: Any, tokens: int, experts: int) -> None:
    """Of numbers far and near: the three parts are the number, to the last of its bits but one."""
    gradient = torch.randn(tokens, experts, device=device) * 10.0 ** torch.randint(-12, 12, (tokens, 1), device=device)
    cut = kernels.split_gradient(gradient)
    assert cut.dtype is torch.bfloat16
    whole = cut.double().view(tokens, 3, experts).sum(1)
    assert ((whole - gradient).abs() <= gradient.abs().double() * 2.0**-23).all()


def routed(device: str, kernels: Any, tokens: int, experts: int, per_token: int) -> None:
    """The same choices as torch's; weights and slopes as near to float64 as float32 is."""
    logits, upstream = torch.randn(tokens, experts, device=device) * 3, torch.randn(tokens, per_token, device=device)
    replayed = torch.rand(tokens, experts, device=device).argsort(1)[:, :per_token]
    # What is replayed may be far below what the router would choose.
    logits.scatter_add_(1, (replayed[:, :1] + 1) % experts, torch.full((tokens, 1), 20.0, device=device))
    for renormalized in (True, False):
        for chosen in (None, replayed):
            leaf, exact_leaf = logits.clone().requires_grad_(), logits.double().requires_grad_()
            found, weights = kernels.route_tokens(leaf, per_token, 2.5, renormalized, chosen)
            of = routing.Routing(experts, per_token, renormalized=renormalized, scale=2.5, dtype=torch.float64)
            expected, exact = routing.plain_route_tokens(exact_leaf, of, chosen=chosen)
            assert torch.equal(found, expected)
            weights.backward(upstream)
            exact.backward(upstream.double())
            assert leaf.grad is not None
            assert exact_leaf.grad is not None
            assert ((weights - exact).abs() <= 1e-6 * 2.5).all()
            assert ((leaf.grad - exact_leaf.grad).abs() <= 5e-6 * 2.5).all()


def norm_sums(device: str, kernels: Any, rows: int, width: int) -> None:
    """The gradient of a norm's weight, added to a sum that something is in already."""
    x, upstream = torch.randn(rows, width, device=device), torch.randn(rows, width, device=device)
    weight = nn.Parameter(torch.rand(width, device=device) + 0.5)
    exact = weight.detach().double().requires_grad_()
    norm.plain_rms_norm(x.double(), exact, 1e-5).backward(upstream.double())
    assert exact.grad is not None
    for of_sum, within in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        before = torch.randn(width, device=device).to(of_sum)
        weight.main_grad = before.clone()  # type: ignore[attr-defined]
        kernels.rms_norm(x, weight, 1e-5).backward(upstream)
        expected = before.double() + exact.grad
        off = (weight.main_grad.double() - expected).abs().max()  # type: ignore[attr-defined]
        assert off <= within * expected.abs().max()
        assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]


CHECKS: dict[str, tuple[str, Callable[..., None]]] = {
    "order": ("permutation", order),
    "sent": ("destinations", sent),
    "counts": ("routing", counts),
    "entropies": ("routing", entropies),
    "parts": ("routing", parts),
    "routed": ("routing", routed),
    "norm sums": ("norm", norm_sums),
}
