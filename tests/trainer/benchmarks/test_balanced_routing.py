"""Choices of experts that a benchmark hands in, of which every expert gets as many."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.trainer.engines import balanced_routing

from builders import dense_model, moe_model

LAYERS, EXPERTS, PER_TOKEN = 3, 128, 8


def test_every_expert_gets_as_many_tokens_and_no_token_the_same_twice() -> None:
    routing = balanced_routing(moe_model(layers=LAYERS), 256, np.random.default_rng(1))
    assert routing.shape == (256, LAYERS, PER_TOKEN)
    for layer in range(LAYERS):
        # Zero means that a token routes by itself.
        counts = np.bincount(routing[:, layer].ravel(), minlength=EXPERTS + 1)
        assert counts.tolist() == [0, *[256 * PER_TOKEN // EXPERTS] * EXPERTS]
        assert all(len(set(choices)) == PER_TOKEN for choices in routing[:, layer].tolist())
    assert not np.array_equal(routing[:, 0], routing[:, 1])


def test_models_whose_experts_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(ValueError, match="models with experts"):
        balanced_routing(dense_model(layers=1), 8, np.random.default_rng(1))
    with pytest.raises(ValueError, match="100 experts are not dealt out 8 at a time"):
        balanced_routing(moe_model(layers=1, experts=100), 8, np.random.default_rng(1))
