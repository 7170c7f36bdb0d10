"""Metrics of an update are those of Transformers' routers, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from moejob_api.models.shape import Family
from trainer.parity.balancing import LENGTHS, UNGROUPED, WatchedModel
from trainer.parity.cells import Cell, first_update, make_documents, reference_model
from trainer.worlds import Worlds

Written = Callable[[Family], tuple[Path, Mapping[str, float]]]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": {"tensor": 2},
    "CP2": {"context": 2},
    "EP2": {"expert": 2},
    "PP2": {"pipeline": 2},
    "PP2.VPP2": {"pipeline": 2, "virtualPipeline": 2},
    "DP2": {"data": 2},
}
CAPPED: dict[str, Any] = {"balancing": "None", "capacityFactor": 1.0}


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The folder of a model, and what its first global batch says in float64; written when first asked for."""

    @cache
    def of(family: Family) -> tuple[Path, Mapping[str, float]]:
        folder = tmp_path_factory.mktemp(f"measured-{family}")
        model = reference_model(family, **UNGROUPED)
        if family is Family.DEEPSEEK_V3:
            # No token chooses the last expert of the last layer.
            model.model.layers[-1].mlp.gate.e_score_correction_bias[-1] = -10.0
        model.save_pretrained(folder / "first")
        return folder, _by_hand(model.double())

    return of


def _by_hand(model: PreTrainedModel) -> Mapping[str, float]:
    watched = WatchedModel(model)
    with torch.no_grad():
        said = [watched.run_document(torch.from_numpy(document.tokens))[1] for document in make_documents(0, LENGTHS)]
    layers = [[of_document[layer] for of_document in said] for layer in range(len(watched.routers))]
    counts = [np.bincount(torch.cat([one.chosen for one in layer]).flatten().numpy(), minlength=8) for layer in layers]
    imbalances = [of_layer.max() / of_layer.mean() for of_layer in counts]
    entropies = []
    for layer in layers:
        logits = torch.cat([one.logits for one in layer])
        scores = logits.sigmoid() if hasattr(watched.routers[0], "e_score_correction_bias") else logits.exp()
        shares = scores / scores.sum(-1, keepdim=True)
        entropies.append(float(-(shares * shares.log()).sum(-1).mean()))
    first = len(model.model.layers) - len(layers)
    return {
        "routerEntropy": float(np.mean(entropies)),
        "expertImbalance": float(np.mean(imbalances)),
        "worstExpertImbalance": float(np.max(imbalances)),
        "worstExpertLayer": float(np.argmax(imbalances) + first),
        "idleExperts": float(sum((of_layer == 0).sum() for of_layer in counts)),
        "idleExpertShare": float(np.mean([(of_layer == 0).mean() for of_layer in counts])),
        "expertUse": float(np.mean([_use_by_hand(of_layer) for of_layer in counts])),
        "worstExpertUse": float(np.min([_use_by_hand(of_layer) for of_layer in counts])),
        "collapsedLayers": 0.0,
    }


def _use_by_hand(counts: Any) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()) / len(counts))


def _cell(family: Family = Family.QWEN3_MOE, *, moe: dict[str, Any] | None = None, **sections: Any) -> Cell:
    # Rows with padding, which chooses no expert.
    base = {"data": {"packing": False}, "training": {"microBatchSize": 2}, "moe": moe or {"balancing": "None"}}
    return Cell(family, base | sections, lengths=LENGTHS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [Family.QWEN3_MOE, Family.DEEPSEEK_V3])
def test_every_rank_tells_how_evenly_experts_were_chosen(
    worlds: Worlds, written: Written, family: Family, layout: str
) -> None:
    folder, expected = written(family)
    cell = _cell(family, parallelism=LAYOUTS[layout])
    for result in worlds.run(cell.ranks(), first_update, cell, folder):
        for name, value in expected.items():
            np.testing.assert_allclose(result.metrics[name], value, rtol=1e-5, err_msg=name)
        # Three experts for each token, in every layer with experts.
        counts = result.expert_counts
        assert counts is not None
        assert counts.choices.shape == (len(counts.layers), 8)
        assert set(counts.choices.sum(-1)) == {3 * sum(LENGTHS)}


def test_what_is_computed_again_is_not_counted_again(worlds: Worlds, written: Written) -> None:
    folder, expected = written(Family.QWEN3_MOE)
    cell = _cell(training={"microBatchSize": 2, "recompute": {"granularity": "Full"}})
    (result,) = worlds.run(1, first_update, cell, folder)
    for name, value in expected.items():
        np.testing.assert_allclose(result.metrics[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("layout", ["one rank", "EP2", "PP2", "DP2"])
def test_choices_beyond_the_capacity_are_dropped_in_every_layout_alike(
    worlds: Worlds, written: Written, layout: str
) -> None:
    folder, _ = written(Family.QWEN3_MOE)
    (alone,) = worlds.run(1, first_update, _cell(moe=CAPPED), folder)
    assert 0.01 < alone.metrics["dropRate"] < 0.9
    cell = _cell(moe=CAPPED, parallelism=LAYOUTS[layout])
    for result in worlds.run(cell.ranks(), first_update, cell, folder):
        np.testing.assert_allclose(result.metrics["dropRate"], alone.metrics["dropRate"], rtol=1e-12)
        # What was dropped leaves nothing behind.
        np.testing.assert_allclose(result.loss, alone.loss, rtol=1e-6)
        np.testing.assert_allclose(result.gradient_norm, alone.gradient_norm, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arithmetic_is_that_of_the_active_weights_and_of_causal_attention(
    worlds: Worlds, written: Written, layout: str
) -> None:
    folder, _ = written(Family.QWEN3_MOE)
    weights = {
        name: parameter.numel() * (3 / 8 if "experts" in name else 1)
        for name, parameter in reference_model(Family.QWEN3_MOE).named_parameters()
        # Rows are looked up.
        if "embed_tokens" not in name
    }
    tokens, pairs = sum(LENGTHS), sum(length * length / 2 for length in LENGTHS)
    # Scores and values, each a multiplication and an addition, forward and twice backward.
    layers, heads, head_size = 4, 8, 10
    expected = 6 * sum(weights.values()) * tokens + 2 * 2 * 3 * layers * heads * head_size * pairs
    cell = _cell(parallelism=LAYOUTS[layout])
    for result in worlds.run(cell.ranks(), first_update, cell, folder):
        assert result.tokens == tokens
        np.testing.assert_allclose(result.flops, expected, rtol=1e-9)
        assert 0 < result.metrics["peakMemoryBytes"] < 64 * 2**30
