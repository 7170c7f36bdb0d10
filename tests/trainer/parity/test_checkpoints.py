"""A run that is saved in one layout resumes in every other one: the same state to the bit, and the same losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builders import merge_sections
from moejob_api.models.shape import Family
from trainer.parity.balancing import Expected
from trainer.parity.cells import LAYOUTS, Cell
from trainer.parity.checkpoints import (
    WEIGHTS,
    Resumption,
    SavedRun,
    measure_distances,
    resume_runs,
    state_in,
    train_and_save,
    unequal_names,
)
from trainer.parity.matrix import MATRIX, Entry
from trainer.parity.references import Reference
from trainer.rows import make_rows
from trainer.worlds import Worlds

Further = Callable[[Family], tuple[Path, Expected]]
# A way of training, and where its first weights lie.
LauncherTiming = tuple[Cell, Path]

SINGLE = "single"
OF_ONE: dict[str, dict[str, Any]] = {SINGLE: {}} | LAYOUTS
ALL = (
    SINGLE,
    "TP2",
    "PP2",
    "PP2.VPP2",
    "EP2",
    "ETP2 folded",
    "CP2",
    "DP4",
    "EP4 folded over DP4",
    "TP2.PP2.EP2",
)


@dataclass(frozen=True)
class Kind:
    """A model, how it is trained, the layouts it is saved and resumed in, and how near losses have to be."""

    family: Family
    layouts: tuple[str, ...]
    within: float = 1e-6
    sections: str = ""
    has_mtp: bool = False
    # Of the model's config.
    changes: tuple[tuple[str, Any], ...] = ()


# Before a layout: layers of Megatron's own compute there.
MEGATRON = "Megatron "
SECTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "bias": {"moe": {"balancing": "ExpertBias"}},
    "frozen": {"moe": {"freezeRouter": True}},
    "plain": {"moe": {"balancing": "None"}},
    "frozen and plain": {"moe": {"balancing": "None", "freezeRouter": True}},
    "bfloat16": {"model": {"dtype": "bfloat16"}, "training": {"precision": {"moments": "bfloat16"}}},
}
KINDS: dict[str, Kind] = {
    "Qwen3-MoE": Kind(Family.QWEN3_MOE, ALL),
    "DeepSeek-V3 with moving bias": Kind(
        Family.DEEPSEEK_V3, (SINGLE, "PP2.VPP2", "EP4 folded over DP4", "TP2.PP2.EP2"), sections="bias"
    ),
    "DeepSeek-V3 with MTP": Kind(
        Family.DEEPSEEK_V3, (SINGLE, "PP2.VPP2", "DP4", "TP2.PP2.EP2"), sections="bias", has_mtp=True
    ),
    "Mixtral": Kind(Family.MIXTRAL, ("TP2", "EP2", "ETP2 folded")),
    "tied Qwen2": Kind(Family.QWEN2, (SINGLE, "TP2", "PP2", "DP4")),
    "frozen router": Kind(Family.QWEN3_MOE, (SINGLE, "TP2", "PP2", "EP4 folded over DP4"), sections="frozen"),
    "Qwen3-MoE of both implementations": Kind(
        Family.QWEN3_MOE,
        (SINGLE, "PP2", *(MEGATRON + layout for layout in (SINGLE, "PP2.VPP2", "DP4", "TP2.PP2.EP2"))),
        sections="plain",
    ),
    "tied Qwen2 of both implementations": Kind(
        Family.QWEN2, (SINGLE, MEGATRON + "PP2", MEGATRON + "TP2"), sections="plain"
    ),
    "GLM-4.5 of both implementations": Kind(
        Family.GLM4_MOE,
        ("EP2", MEGATRON + "TP2.PP2.EP2"),
        sections="frozen and plain",
        changes=(("num_experts_per_tok", 4),),
    ),
    # Layouts round sums differently; what is resumed in its own layout is exact all the same.
    "bfloat16": Kind(Family.QWEN3_MOE, (SINGLE, "TP2", "PP2", "DP4"), within=5e-3, sections="bfloat16"),
}
# After steps of sums that were rounded differently, relative to the largest element of each tensor.
STATES_WITHIN = 2e-4
CELLS = [(name, layout) for name, kind in KINDS.items() for layout in kind.layouts]
# What all layouts have saved is always read by one that divides most of the model, and of Qwen3-MoE by one rank.
DIVIDING = {
    "Qwen3-MoE": "TP2.PP2.EP2",
    "DeepSeek-V3 with moving bias": "EP4 folded over DP4",
    "DeepSeek-V3 with MTP": "PP2.VPP2",
    "Mixtral": "ETP2 folded",
    "tied Qwen2": "PP2",
    "frozen router": "EP4 folded over DP4",
    "Qwen3-MoE of both implementations": MEGATRON + "TP2.PP2.EP2",
    "tied Qwen2 of both implementations": MEGATRON + "PP2",
    "GLM-4.5 of both implementations": MEGATRON + "TP2.PP2.EP2",
    "bfloat16": "DP4",
}
ALWAYS = [
    ("Qwen3-MoE", SINGLE),
    ("Qwen3-MoE of both implementations", "PP2"),
    *((name, layout) for name, layout in DIVIDING.items() if name not in ("Mixtral", "frozen router", "tied Qwen2")),
]


@dataclass(frozen=True)
class Matrix:
    """Checkpoints of every way of training, written when first asked for."""

    worlds: Worlds
    first: Callable[[Kind], Path]
    folder: Path
    saved: Callable[[str, str], SavedRun]

    def way(self, name: str, layout: str) -> LauncherTiming:
        """A cell of the matrix."""
        kind = KINDS[name]
        sections = merge_sections(SECTIONS[kind.sections], {"parallelism": OF_ONE[layout.removeprefix(MEGATRON)]})
        if layout.startswith(MEGATRON):
            sections = merge_sections(sections, {"model": {"implementation": "Megatron"}})
        cell = Cell(kind.family, sections)
        return cell, self.first(kind)

    def resumed(self, name: str, layout: str, resumptions: Sequence[Resumption]) -> list[tuple[float, ...]]:
        """The losses after each of these checkpoints in that layout, the same on every rank."""
        cell, first = self.way(name, layout)
        of_ranks = self.worlds.run(cell.ranks(), resume_runs, cell, first, resumptions)
        assert all(found == of_ranks[0] for found in of_ranks)
        losses: list[tuple[float, ...]] = of_ranks[0]
        return losses

    def resumption(self, name: str, written: str, read: str, **settings: Any) -> Resumption:
        """From one layout into another one."""
        again = self.folder / "again" / name / written / read / "-".join(sorted(settings))
        return Resumption(self.saved(name, written), again, **settings)


@pytest.fixture(scope="module")
def matrix(worlds: Worlds, reference: Reference, further: Further, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("checkpoints")

    def first(kind: Kind) -> Path:
        return further(kind.family)[0] if kind.has_mtp else reference(kind.family, **dict(kind.changes))[0]

    @cache
    def written(name: str, layout: str) -> SavedRun:
        cell, first = made.way(name, layout)
        found: SavedRun = worlds.run(cell.ranks(), train_and_save, cell, first, folder / name / layout)[0]
        return found

    made = Matrix(worlds, first, folder, written)
    return made


# The others are written in all layouts, and read again, by the rows of the next test.
WRITTEN = [cell for cell in CELLS if KINDS[cell[0]].sections != "bfloat16"]


@pytest.mark.parametrize(
    ("name", "layout"), make_rows(WRITTEN, [cell for cell in WRITTEN if cell[0] in {name for name, _ in ALWAYS}])
)
def test_a_checkpoint_holds_the_same_whatever_the_layout(matrix: Matrix, name: str, layout: str) -> None:
    expected = state_in(matrix.saved(name, KINDS[name].layouts[0]).folder)
    far = measure_distances(state_in(matrix.saved(name, layout).folder), expected)
    assert {kind: error for kind, error in far.items() if not error <= STATES_WITHIN} == {}


@pytest.mark.parametrize(("name", "layout"), make_rows(CELLS, ALWAYS))
def test_what_any_layout_saved_is_resumed(
    matrix: Matrix, name: str, layout: str, record_property: Callable[[str, object], None]
) -> None:
    kind = KINDS[name]
    resumptions = [matrix.resumption(name, written, layout) for written in kind.layouts]
    found = matrix.resumed(name, layout, resumptions)
    for written, resumption, losses in zip(kind.layouts, resumptions, found, strict=True):
        differing = unequal_names(state_in(resumption.again), state_in(resumption.saved.folder))
        assert differing == [], f"saved in {written}"
        within = 0.0 if written == layout else kind.within
        np.testing.assert_allclose(losses, resumption.saved.losses, rtol=within, err_msg=f"saved in {written}")
        worst = np.abs(np.divide(losses, resumption.saved.losses) - 1).max().item()
        title = f"{name}, saved in a row's layout and resumed in a column's: relative error of the losses that follow"
        record_property(MATRIX, Entry(title, written, layout, (worst,)).as_json)


def test_another_job_begins_with_the_weights_alone(matrix: Matrix) -> None:
    name = "bfloat16"
    resumption = matrix.resumption(name, "TP2", "PP2", weights_only=True)
    (losses,) = matrix.resumed(name, "PP2", [resumption])
    begun, before = state_in(resumption.again), state_in(resumption.saved.folder)
    assert unequal_names(_weights(begun), _weights(before)) == []
    moments = [tensor for (kind, _), tensor in begun.items() if kind != WEIGHTS]
    assert moments
    assert not any(tensor.any() for tensor in moments)
    assert losses[0] == pytest.approx(resumption.saved.losses[0], rel=KINDS[name].within)


@pytest.mark.parametrize("forgotten", ["weights_only", "forgets_counters"])
def test_a_resumption_that_forgets_something_is_seen(matrix: Matrix, forgotten: str) -> None:
    resumption = matrix.resumption("Qwen3-MoE", SINGLE, SINGLE, **{forgotten: True})
    (losses,) = matrix.resumed("Qwen3-MoE", SINGLE, [resumption])
    assert losses[0] == resumption.saved.losses[0]
    assert abs(losses[1] / resumption.saved.losses[1] - 1) > 1e-4


def test_an_element_that_is_written_twice_or_never_is_seen(matrix: Matrix, tmp_path: Path) -> None:
    lying = matrix.saved("Qwen3-MoE", "TP2").folder
    for name, copied in {"twice": (0, 1, 1), "never": (0,)}.items():
        folder = tmp_path / name
        folder.mkdir()
        for number, rank in enumerate(copied):
            (folder / f"{number}.safetensors").write_bytes((lying / f"state-{rank:05d}.safetensors").read_bytes())
        with pytest.raises(AssertionError):
            assert unequal_names(state_in(folder), state_in(lying)) == []


def _weights(state: Mapping[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    return {key: tensor for key, tensor in state.items() if key[0] == WEIGHTS}
