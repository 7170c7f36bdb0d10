"""A model that is trained on given choices of experts is the one that Transformers trains on them, in every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejob_api.models.shape import Family
from trainer.parity.cells import (
    ALIKE,
    FOLDED,
    LAYOUTS,
    Cell,
    StepMeasurements,
    assert_like,
    make_documents,
    reference_model,
)
from trainer.parity.references import Reference
from trainer.parity.routing_replay import (
    MISTAKEN,
    given_log_probabilities,
    own_choices,
    random_choices,
    reference_in,
    replayed_documents,
    replayed_once,
    train_replayed,
    write_choices,
    write_replayed_reference,
)
from trainer.rows import make_rows
from trainer.worlds import Worlds

WITHIN = 1e-5
SHARED: dict[str, dict[str, Any]] = {
    "FSDP over DP3": {"parallelism": {"data": 3}, "memory": {"sharding": "FSDP"}},
    "FSDP over TP2.EP2.DP2": {
        "parallelism": {"tensor": 2, "expert": 2, "data": 2, **FOLDED},
        "memory": {"sharding": "FSDP"},
    },
    "tokens gathered over EP2": {"parallelism": {"expert": 2}, "moe": {"dispatcher": "AllGather"}},
    "tokens written to peers of EP2": {"parallelism": {"expert": 2}, "moe": {"dispatcher": "Flex"}},
    "tokens sent to two nodes of EP4": {
        "parallelism": {"expert": 4},
        "moe": {"dispatcher": "Flex"},
        "resources": {"gpusPerNode": 2},
    },
}
OF_DEEPSEEK = ("TP2", "PP2.VPP2", "CP2.EP2 folded over CP2", "PP2.EP2.CP2")
ALL: dict[str, dict[str, Any]] = {name: {"parallelism": layout} for name, layout in LAYOUTS.items()} | SHARED
CELLS = [
    *((Family.QWEN3_MOE, name) for name in ALL),
    # Dense layers first, and shared experts; chosen by sigmoids in groups.
    *((Family.DEEPSEEK_V3, name) for name in OF_DEEPSEEK),
    # Every second layer is dense.
    *((Family.QWEN2_MOE, name) for name in ("PP2", "TP2.CP2.DP2")),
]
# Mixes in which ranks divide tokens, layers and experts in every way.
ALWAYS = [
    *((Family.QWEN3_MOE, name) for name in ("PP2.VPP2", "ETP2 folded", "TP2.PP2.EP2")),
    *((Family.QWEN3_MOE, name) for name in ("FSDP over TP2.EP2.DP2", "tokens gathered over EP2")),
    (Family.DEEPSEEK_V3, "CP2.EP2 folded over CP2"),
    (Family.QWEN2_MOE, "PP2"),
]


@pytest.fixture(scope="session")
def replay_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    @cache
    def written(family: Family) -> tuple[Path, StepMeasurements]:
        folder = tmp_path_factory.mktemp(f"replayed-{family}")
        reference_model(family).save_pretrained(folder / "first")
        return folder, write_replayed_reference(folder, random_choices)

    return written


def _assert_like_reference(worlds: Worlds, reference: Reference, cell: Cell) -> None:
    folder, expected = reference(cell.family)
    ranks = worlds.run(cell.ranks(), train_replayed, cell, folder)
    assert_like([rank.trained for rank in ranks], expected, within=WITHIN)
    model = reference_in(folder)
    batch = replayed_documents(0, folder)
    for rank in ranks:
        for number, said in rank.outputs.items():
            np.testing.assert_allclose(said, given_log_probabilities(model, batch[number]), rtol=WITHIN, atol=WITHIN)
    # Three random ones of eight experts: a router's own are among them three times in eight.
    assert all(0.5 < share < 0.75 for rank in ranks for share in rank.disagreement)
    assert {rank.disagreement for rank in ranks} == {ranks[0].disagreement}
    # Each layer replays as many choices.
    for rank in ranks:
        np.testing.assert_allclose(np.mean(rank.layer_disagreement), rank.disagreement[0], rtol=1e-9)
        assert len(set(rank.layer_disagreement)) > 1


@pytest.mark.parametrize("family", [Family.QWEN3_MOE, Family.QWEN2_MOE, Family.DEEPSEEK_V3])
def test_one_rank_trains_on_given_choices_as_transformers_does(
    worlds: Worlds, replay_reference: Reference, family: Family
) -> None:
    _assert_like_reference(worlds, replay_reference, Cell(family, {}))


@pytest.mark.parametrize(("family", "layout"), make_rows(CELLS, ALWAYS))
def test_a_layout_trains_on_given_choices_as_transformers_does(
    worlds: Worlds, replay_reference: Reference, family: Family, layout: str
) -> None:
    _assert_like_reference(worlds, replay_reference, Cell(family, ALL[layout]))


@pytest.mark.parametrize("how", make_rows(ALIKE, ("everything recomputed", "one document at a time")))
def test_what_is_computed_again_is_computed_on_the_same_choices(
    worlds: Worlds, replay_reference: Reference, how: str
) -> None:
    parallelism = {"parallelism": {"tensor": 2, "expert": 2, "expertLayout": "Folded"}}
    _assert_like_reference(worlds, replay_reference, Cell(Family.QWEN3_MOE, parallelism | ALIKE[how]))


@pytest.mark.parametrize("layout", ["TP2", "CP2"])
def test_replaying_what_routers_choose_themselves_changes_nothing(
    worlds: Worlds, reference: Reference, tmp_path: Path, layout: str
) -> None:
    plain, expected = reference(Family.QWEN3_MOE)
    model = reference_in(plain)
    (tmp_path / "first").symlink_to(plain / "first")
    write_choices(tmp_path, 0, {str(one.id): own_choices(model, one.tokens) for one in make_documents(0)})
    cell = Cell(Family.QWEN3_MOE, {"parallelism": LAYOUTS[layout]})
    for loss, off, disagreement in worlds.run(cell.ranks(), replayed_once, cell, tmp_path, plain / "gradients"):
        assert loss == pytest.approx(expected.losses[0], rel=WITHIN)
        assert off < 20 * WITHIN
        assert disagreement == 0.0


@pytest.mark.parametrize("mutant", MISTAKEN)
def test_a_choice_in_a_wrong_place_is_seen(worlds: Worlds, replay_reference: Reference, mutant: str) -> None:
    cell = Cell(Family.QWEN3_MOE, {"parallelism": {"context": 2}}, mutant)
    with pytest.raises(AssertionError, match=r"off by|Not equal"):
        _assert_like_reference(worlds, replay_reference, cell)
