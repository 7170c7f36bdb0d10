"""Experts under a capacity, against a loop over tokens; and what cannot be dispatched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from builders import spec
from model_configs import config
from moejob_api.models.shape import Experts, Family
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.groups import ALONE, Groups
from moejob_trainer.layers.documents import Documents
from moejob_trainer.model.architecture import Architecture, architecture
from moejob_trainer.model.layer import mixture_settings
from moejob_trainer.model.linear import TensorShare
from moejob_trainer.model.mixture import Mixture
from moejob_trainer.model.row import OwnTokens, row_of

HIDDEN, TOKENS, PADDING = 24, 20, 4


def _model() -> Architecture:
    return architecture(config(Family.QWEN3_MOE, norm_topk_prob=True))


def _mixture(**moe: Any) -> Mixture:
    model = _model()
    shape = model.shape.experts
    assert isinstance(shape, Experts)
    settings = mixture_settings(model, spec(moe={"balancing": "None", **moe}))
    torch.manual_seed(3)
    mixture = Mixture(shape, HIDDEN, Groups(), TensorShare(ALONE, sequence_parallel=False), settings)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixture


def _mixed(mixture: Mixture, x: Tensor) -> Tensor:
    """The last tokens are padding."""
    documents = Documents.of([TOKENS, PADDING])
    is_real = torch.arange(TOKENS + PADDING) < TOKENS
    row = row_of(documents, _model().rotary, None, OwnTokens(is_real, documents.segments()))
    result: Tensor = mixture(x, row)
    return result


def _by_hand(mixture: Mixture, x: Tensor, most: int) -> tuple[Tensor, int]:
    """Each expert takes the tokens that want it the most."""
    x = x.double()
    scores = (x @ mixture.router.weight.double().T).softmax(-1)
    best = scores.topk(mixture.shape.per_token)
    weights = torch.zeros_like(scores).scatter(1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    y, dropped = torch.zeros_like(x), 0
    for expert in range(mixture.shape.count):
        wanting = weights[:TOKENS, expert].argsort(descending=True)
        wanting = wanting[weights[wanting, expert] > 0]
        dropped += len(wanting[most:])
        gate, up = (mixture.experts.gate_up[expert].double() @ x.T).unbind(0)
        made = (torch.nn.functional.silu(gate) * up).T @ mixture.experts.down[expert].double().T
        taken = wanting[:most]
        y[taken] += weights[taken, expert, None] * made[taken]
    return y, dropped


@pytest.mark.parametrize("dispatcher", ["AllToAll", "AllGather"])
def test_an_expert_takes_no_more_than_its_capacity(dispatcher: str) -> None:
    mixture = _mixture(capacityFactor=0.5, dispatcher=dispatcher)
    x = torch.randn(TOKENS + PADDING, HIDDEN, generator=torch.Generator().manual_seed(5))
    # Half an even share of 20 tokens that choose three of eight experts each; padding wants nothing.
    expected, dropped = _by_hand(mixture, x, most=4)
    y = _mixed(mixture, x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert dropped > 0
    assert int(mixture.balance.dropped) == dropped


def test_a_token_that_no_expert_takes_adds_nothing_to_what_goes_past_them() -> None:
    mixture = _mixture(capacityFactor=0.1)
    x = torch.randn(TOKENS + PADDING, HIDDEN, generator=torch.Generator().manual_seed(5)).requires_grad_()
    y = _mixed(mixture, x)
    expected, _ = _by_hand(mixture, x.detach(), most=1)
    untaken = (expected == 0).all(-1)
    assert untaken[:TOKENS].any()
    assert (y[untaken] == 0).all()
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad[untaken] == 0).all()


def test_what_is_not_in_the_image_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="DeepEP"):
        mixture_settings(_model(), spec(moe={"dispatcher": "Flex"}))
