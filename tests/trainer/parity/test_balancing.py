"""Balancing is what its definition says, in every layout: the losses, all gradients and the bias on the choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import merge_sections
from moejob_api.models.shape import Family
from trainer.parity.balancing import LENGTHS, Expected, Rules, write_balanced_reference
from trainer.parity.cells import Cell, assert_like, train_cell, update_parameters
from trainer.rows import make_rows
from trainer.worlds import Worlds

Balanced = Callable[[Rules], tuple[Path, Expected]]

WITHIN = 1e-5
BALANCED = ("AuxLoss", "SeqAuxLoss", "GlobalAuxLoss")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": {"tensor": 2},
    "CP2": {"context": 2},
    "EP2": {"expert": 2},
    "PP2": {"pipeline": 2},
    "DP2": {"data": 2},
    "TP2.CP2.PP2": {"tensor": 2, "context": 2, "pipeline": 2},
    "TP2.CP2.EP2": {"tensor": 2, "context": 2, "expert": 2},
}
# How documents meet in micro batches, which is nothing to balancing.
TOGETHER: dict[str, dict[str, Any]] = {
    "packed": {"data": {"packing": True}},
    "padded": {"data": {"packing": False}, "training": {"microBatchSize": 2}},
    "by tokens": {"training": {"dynamicBatchTokens": 48}},
}
AGAIN: dict[str, Any] = {"recompute": {"granularity": "Full"}}


@pytest.fixture(scope="session")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Balanced:
    """The folder of what rules do to training, and what was measured; written when first asked for."""

    @cache
    def written(rules: Rules) -> tuple[Path, Expected]:
        folder = tmp_path_factory.mktemp("balanced")
        return folder, write_balanced_reference(rules, folder)

    return written


def _cell(rules: Rules, moe: dict[str, Any], layout: dict[str, Any], together: str = "packed", **training: Any) -> Cell:
    sections = merge_sections(TOGETHER[together], {"training": training, "moe": moe, "parallelism": layout})
    return Cell(rules.family, sections, lengths=LENGTHS)


def _strong(balancing: str) -> tuple[Rules, dict[str, Any]]:
    """A loss that a mistake in it would show in every number."""
    moe = {"balancing": balancing, "auxLossCoefficient": 0.4, "zLossCoefficient": 0.01}
    return Rules(loss=balancing, coefficient=0.4, z_coefficient=0.01), moe


def _assert_like_reference(worlds: Worlds, balanced: Balanced, rules: Rules, cell: Cell) -> None:
    folder, expected = balanced(rules)
    assert_like(worlds.run(cell.ranks(), train_cell, cell, folder), expected.steps, within=WITHIN)


# Those that divide the tokens a loss is of; eight ranks take as long as all others together.
ALWAYS = [
    *product(BALANCED, ("one rank", "CP2", "DP2")),
    ("AuxLoss", "TP2"),
    ("SeqAuxLoss", "TP2.CP2.PP2"),
    ("GlobalAuxLoss", "TP2.CP2.EP2"),
]


@pytest.mark.parametrize(("balancing", "layout"), make_rows(product(BALANCED, LAYOUTS), ALWAYS))
def test_a_balancing_loss_is_that_of_the_global_batch_in_every_layout(
    worlds: Worlds, balanced: Balanced, balancing: str, layout: str
) -> None:
    rules, moe = _strong(balancing)
    _assert_like_reference(worlds, balanced, rules, _cell(rules, moe, LAYOUTS[layout]))


@pytest.mark.parametrize("together", ["padded", "by tokens"])
@pytest.mark.parametrize("balancing", BALANCED)
def test_documents_are_balanced_alike_whatever_micro_batch_they_are_in(
    worlds: Worlds, balanced: Balanced, balancing: str, together: str
) -> None:
    rules, moe = _strong(balancing)
    _assert_like_reference(worlds, balanced, rules, _cell(rules, moe, {"data": 2}, together))


@pytest.mark.parametrize("balancing", BALANCED)
def test_what_is_computed_again_sees_the_counts_it_saw_before(
    worlds: Worlds, balanced: Balanced, balancing: str
) -> None:
    rules, moe = _strong(balancing)
    # Interleaved, micro batches that came later were counted by then.
    layout = {"pipeline": 2, "virtualPipeline": 2}
    _assert_like_reference(worlds, balanced, rules, _cell(rules, moe, layout, **AGAIN))


@pytest.mark.parametrize("balancing", BALANCED)
def test_ranks_that_divide_the_weights_balance_alike(worlds: Worlds, balanced: Balanced, balancing: str) -> None:
    rules, moe = _strong(balancing)
    cell = _cell(rules, moe, {"data": 2})
    _assert_like_reference(
        worlds, balanced, rules, replace(cell, sections=merge_sections(cell.sections, {"memory": {"sharding": "FSDP"}}))
    )


def test_supervised_fine_tuning_balances_documents_unless_the_job_says_otherwise(
    worlds: Worlds, balanced: Balanced
) -> None:
    rules = Rules(coefficient=1e-3)
    _assert_like_reference(worlds, balanced, rules, _cell(rules, {"balancing": None}, {}))


@pytest.mark.parametrize("layout", ["one rank", "TP2", "DP2", "EP2", "TP2.CP2.PP2"])
def test_the_bias_on_the_choice_moves_alike_on_every_rank(worlds: Worlds, balanced: Balanced, layout: str) -> None:
    rules = Rules(Family.DEEPSEEK_V3, bias_rate=0.05)
    cell = _cell(rules, {"balancing": "ExpertBias", "expertBiasUpdateRate": 0.05}, LAYOUTS[layout])
    folder, expected = balanced(rules)
    found = worlds.run(cell.ranks(), train_cell, cell, folder)
    assert_like(found, expected.steps, within=WITHIN)
    # The first layer has no experts.
    by_name = {f"layers.{index + 1}.moe.router.selection_bias": b for index, b in enumerate(expected.selection_biases)}
    assert {name for of_rank in found for name in of_rank.selection_biases} == by_name.keys()
    for of_rank in found:
        for name, bias in of_rank.selection_biases.items():
            np.testing.assert_allclose(bias, by_name[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("layout", make_rows(("one rank", "TP2", "TP2.CP2.PP2"), ("one rank", "TP2")))
def test_the_bias_and_the_loss_of_each_sequence_balance_together(
    worlds: Worlds, balanced: Balanced, layout: str
) -> None:
    rules = Rules(Family.DEEPSEEK_V3, loss="SeqAuxLoss", coefficient=0.3, bias_rate=0.05)
    moe = {"balancing": "ExpertBias", "expertBiasUpdateRate": 0.05, "seqAuxLossCoefficient": 0.3}
    _assert_like_reference(worlds, balanced, rules, _cell(rules, moe, LAYOUTS[layout]))


def test_sigmoid_scores_are_balanced_as_shares(worlds: Worlds, balanced: Balanced) -> None:
    rules = Rules(Family.DEEPSEEK_V3, coefficient=0.5)
    moe = {"balancing": "AuxLoss", "auxLossCoefficient": 0.5}
    _assert_like_reference(worlds, balanced, rules, _cell(rules, moe, {"tensor": 2}))


@pytest.mark.parametrize(
    ("moe", "method", "is_trained"),
    [
        pytest.param({}, "SFT", True, id="by supervised fine-tuning"),
        pytest.param({}, "GRPO", False, id="not by reinforcement learning"),
        pytest.param({"freezeRouter": True}, "SFT", False, id="not where it is frozen"),
        pytest.param({"freezeRouter": False}, "GRPO", True, id="where it is not frozen"),
    ],
)
def test_routers_are_trained(
    worlds: Worlds, balanced: Balanced, moe: dict[str, Any], method: str, is_trained: bool
) -> None:
    folder, _ = balanced(Rules(coefficient=1e-3))
    training = {"globalBatchSize": 8} if method == "SFT" else {"globalBatchSize": None}
    cell = Cell(Family.QWEN3_MOE, {"method": method, "moe": moe, "training": training})
    (names,) = worlds.run(1, update_parameters, cell, folder)
    assert any("experts" in name for name in names)
    assert any("router" in name for name in names) is is_trained
