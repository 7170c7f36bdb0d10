"""Every layout that multiplies in FP8 trains what a model of Transformers trains whose products round alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from builders import merge_sections
from moejob_api.models.shape import Family
from trainer.parity.cells import FOLDED, LAYOUTS, Cell, StepMeasurements, TrainedRank, train_cell
from trainer.parity.float8 import write_float8_reference
from trainer.parity.references import Reference
from trainer.rows import make_rows
from trainer.worlds import Worlds

FLOAT8: dict[str, Any] = {"training": {"precision": {"compute": "FP8"}}}
CELLS: dict[str, tuple[Family, dict[str, Any]]] = {
    "one rank": (Family.QWEN3_MOE, {}),
    "one rank, latent attention": (Family.DEEPSEEK_V3, {}),
    "TP2": (Family.QWEN3_MOE, {"parallelism": LAYOUTS["TP2"]}),
    # A mixture needs sequence parallelism there.
    "TP2 without sequence parallelism": (Family.LLAMA, {"parallelism": {"tensor": 2, "sequence": False}}),
    "TP2.EP2, latent attention": (Family.DEEPSEEK_V3, {"parallelism": LAYOUTS["TP2.EP2"]}),
    "PP2.VPP2": (Family.QWEN3_MOE, {"parallelism": LAYOUTS["PP2.VPP2"]}),
    "CP2": (Family.QWEN3_MOE, {"parallelism": LAYOUTS["CP2"]}),
    "EP2.ETP2 folded": (
        Family.QWEN3_MOE,
        {"parallelism": {"data": 4, "expert": 2, "expertTensor": 2, **FOLDED}},
    ),
    "EP2, tokens written to peers": (
        Family.QWEN3_MOE,
        {"parallelism": {"expert": 2}, "moe": {"dispatcher": "Flex"}},
    ),
    "FSDP": (Family.QWEN3_MOE, {"parallelism": {"data": 2}, "memory": {"sharding": "FSDP"}}),
    "ZeRO-2": (Family.QWEN3_MOE, {"parallelism": {"data": 2}, "memory": {"sharding": "ZeRO2"}}),
    "everything recomputed": (Family.QWEN3_MOE, {"training": {"recompute": {"granularity": "Full"}}}),
    "one micro batch": (Family.QWEN3_MOE, {"training": {"microBatchSize": 8}}),
}


@pytest.fixture(scope="session")
def float8_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    @cache
    def written(family: Family) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(f"float8-{family}")
        return folder, write_float8_reference(family, folder)

    return written


# Each way of dividing what is scaled: tensors, experts, tokens and replicas.
ALWAYS = ("one rank", "TP2.EP2, latent attention", "PP2.VPP2", "CP2", "FSDP", "everything recomputed")


@pytest.mark.parametrize("way", make_rows(CELLS, ALWAYS))
def test_a_layout_multiplies_what_one_rank_multiplies(worlds: Worlds, float8_reference: Reference, way: str) -> None:
    family, sections = CELLS[way]
    folder, expected = float8_reference(family)
    cell = Cell(family, merge_sections(FLOAT8, sections))
    assert_near(worlds.run(cell.ranks(), train_cell, cell, folder), expected)


def test_without_fp8_the_same_model_is_further_away_than_that(worlds: Worlds, float8_reference: Reference) -> None:
    folder, expected = float8_reference(Family.QWEN3_MOE)
    found = worlds.run(1, train_cell, Cell(Family.QWEN3_MOE, {}), folder)
    with pytest.raises(AssertionError):
        assert_near(found, expected)


def assert_near(found_on_ranks: Sequence[TrainedRank], expected: StepMeasurements) -> None:
    """Alike in the first step, of the same weights. Sums in another order round a few numbers to the neighbour."""
    for found in (rank.steps for rank in found_on_ranks):
        assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
        assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-4)
        # An eighth away, and updates make other weights of it.
        assert found.losses == pytest.approx(expected.losses, rel=5e-3)
        assert found.norms == pytest.approx(expected.norms, rel=1e-2)
    assert max(rank.gradients.error for rank in found_on_ranks) < 1e-2
