"""Experts under a capacity, against a loop over tokens; and what cannot be dispatched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from builders import spec
from model_configs import config
from moejob_api.models.shape import Experts, Family
from moejob_trainer.distributed.groups import ALONE, Groups
from moejob_trainer.layers.documents import Documents
from moejob_trainer.model.architecture import Architecture, read_architecture
from moejob_trainer.model.layer import moe_settings
from moejob_trainer.model.linear import TensorShare
from moejob_trainer.model.moe_layer import MoELayer
from moejob_trainer.model.packed_batch import LocalTokens, make_packed_batch

HIDDEN, TOKENS, PADDING = 24, 20, 4


def _model() -> Architecture:
    return read_architecture(config(Family.QWEN3_MOE, norm_topk_prob=True))


def _moe(**moe: Any) -> MoELayer:
    model = _model()
    shape = model.shape.experts
    assert isinstance(shape, Experts)
    settings = moe_settings(model, spec(moe={"balancing": "None", **moe}))
    torch.manual_seed(3)
    moe_layer = MoELayer(shape, HIDDEN, Groups(), TensorShare(ALONE, sequence_parallel=False), settings)
    for parameter in moe_layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return moe_layer


def _mixed(moe: MoELayer, x: Tensor) -> Tensor:
    """The last tokens are padding."""
    documents = Documents.from_lengths([TOKENS, PADDING])
    is_real = torch.arange(TOKENS + PADDING) < TOKENS
    packed = make_packed_batch(documents, _model().rotary, None, LocalTokens(is_real, documents.segment_ids()))
    result: Tensor = moe(x, packed)
    return result


def _by_hand(moe: MoELayer, x: Tensor, most: int) -> tuple[Tensor, int]:
    """Each expert takes the tokens that want it the most."""
    x = x.double()
    scores = (x @ moe.router.weight.double().T).softmax(-1)
    best = scores.topk(moe.shape.per_token)
    weights = torch.zeros_like(scores).scatter(1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    y, dropped = torch.zeros_like(x), 0
    for expert in range(moe.shape.count):
        wanting = weights[:TOKENS, expert].argsort(descending=True)
        wanting = wanting[weights[wanting, expert] > 0]
        dropped += len(wanting[most:])
        gate, up = (moe.experts.gate_up[expert].double() @ x.T).unbind(0)
        made = (torch.nn.functional.silu(gate) * up).T @ moe.experts.down[expert].double().T
        taken = wanting[:most]
        y[taken] += weights[taken, expert, None] * made[taken]
    return y, dropped


@pytest.mark.parametrize("dispatcher", ["AllToAll", "AllGather"])
def test_an_expert_takes_no_more_than_its_capacity(dispatcher: str) -> None:
    moe = _moe(capacityFactor=0.5, dispatcher=dispatcher)
    x = torch.randn(TOKENS + PADDING, HIDDEN, generator=torch.Generator().manual_seed(5))
    # Half an even share of 20 tokens that choose three of eight experts each; padding wants nothing.
    expected, dropped = _by_hand(moe, x, most=4)
    y = _mixed(moe, x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert dropped > 0
    assert int(moe.balance.dropped) == dropped


def test_a_token_that_no_expert_takes_adds_nothing_to_what_goes_past_them() -> None:
    moe = _moe(capacityFactor=0.1)
    x = torch.randn(TOKENS + PADDING, HIDDEN, generator=torch.Generator().manual_seed(5)).requires_grad_()
    y = _mixed(moe, x)
    expected, _ = _by_hand(moe, x.detach(), most=1)
    untaken = (expected == 0).all(-1)
    assert untaken[:TOKENS].any()
    assert (y[untaken] == 0).all()
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad[untaken] == 0).all()


def _replaying(moe: MoELayer, x: Tensor, replayed: Tensor, number: int | None) -> Tensor:
    documents = Documents.from_lengths([len(x)])
    own = LocalTokens(torch.ones(len(x), dtype=torch.bool), documents.segment_ids(), {5: replayed})
    moe.number = number
    result: Tensor = moe(x, make_packed_batch(documents, _model().rotary, None, own))
    return result


def test_tokens_go_to_the_experts_that_are_replayed_with_the_weights_of_the_router() -> None:
    moe = _moe()
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    own = torch.softmax(x @ moe.router.weight.T, -1).topk(moe.shape.per_token).indices
    replayed = 1 + own
    # One of its three experts is another, in any order; the last token routes by itself.
    other = next(expert for expert in range(moe.shape.count) if expert not in own[4])
    replayed[4] = 1 + torch.tensor([other, int(own[4, 2]), int(own[4, 0])])
    replayed[-1] = 0
    y, plain = _replaying(moe, x, replayed.to(torch.uint8), 5), _replaying(moe, x, replayed, None)
    same = [token for token in range(TOKENS) if token != 4]
    torch.testing.assert_close(y[same], plain[same], rtol=1e-5, atol=1e-5)
    scores = (x[4].double() @ moe.router.weight.double().T).softmax(-1)
    chosen = [other, int(own[4, 2]), int(own[4, 0])]
    expected = torch.zeros(HIDDEN, dtype=torch.float64)
    for expert in chosen:
        gate, up = moe.experts.gate_up[expert].double() @ x[4].double()
        made = moe.experts.down[expert].double() @ (torch.nn.functional.silu(gate) * up)
        expected += scores[expert] / scores[chosen].sum() * made
    torch.testing.assert_close(y[4].double(), expected, rtol=1e-5, atol=1e-5)
    assert int(moe.balance.replayed) == (TOKENS - 1) * moe.shape.per_token
    assert int(moe.balance.differing) == 1


def test_a_module_for_a_further_token_replays_nothing() -> None:
    moe = _moe()
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(6))
    replayed = torch.ones(TOKENS, moe.shape.per_token, dtype=torch.uint8).cumsum(-1)
    torch.testing.assert_close(_replaying(moe, x, replayed, None), _replaying(moe, x, 0 * replayed, 5))
    assert (_replaying(moe, x, replayed, None) != _replaying(moe, x, replayed, 5)).any()
