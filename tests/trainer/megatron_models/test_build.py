"""Megatron's models as stages: what they compute is in trainer/parity; here is what they refuse, and a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from builders import merge_sections
from moejob_api.models.shape import Family
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from trainer.parity.cells import Cell, start_engine, write_reference
from trainer.runs import Runs, read_steps
from trainer.worlds import Worlds

MEGATRON: dict[str, Any] = {"model": {"implementation": "Megatron"}}
DONE, ALL = 2, 4


def refusal(cell: Cell, folder: Path) -> str:
    """The reason for which the engine of a cell is not built."""
    use_cpu()
    try:
        start_engine(cell, folder)
    except Exception as error:  # noqa: BLE001 the test looks at it
        return str(error)
    finally:
        stop_groups()
    return ""


@pytest.mark.parametrize(
    ("transformer", "changes", "expected"),
    [
        pytest.param({"add_qkv_bias": "true"}, {}, "linear_qkv.bias of (160,) has no place", id="more weights"),
        pytest.param(
            {},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "would turn queries and keys otherwise",
            id="other angles",
        ),
    ],
)
def test_another_model_than_published_is_refused(
    worlds: Worlds, tmp_path: Path, transformer: dict[str, str], changes: dict[str, Any], expected: str
) -> None:
    write_reference(Family.QWEN3_MOE, tmp_path, **changes)
    cell = Cell(Family.QWEN3_MOE, merge_sections(MEGATRON, {"model": {"transformer": transformer}}))
    [found] = worlds.run(1, refusal, cell, tmp_path)
    assert expected in found


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path / "volume")
    yield started
    started.close()


def test_native_layers_go_on_with_a_run_of_megatrons_and_export_the_same(runs: Runs) -> None:
    plain: dict[str, Any] = {
        "moe": {"balancing": "None"},
        # A large epsilon: Adam divides gradients near zero by their own size, and would show rounding.
        "training": {"optimizer": {"epsilon": 1e-3}},
        "checkpoint": {"async": False, "exportHuggingFace": True},
    }

    def run(job: str, steps: int, **sections: Any) -> dict[str, Any]:
        settings = merge_sections(merge_sections(plain, {"training": {"maxSteps": steps}}), sections)
        runs.run_to_end(job, **settings)
        # As many files as ranks wrote.
        files = (runs.volume / job / "export").glob("*.safetensors")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    whole = run("whole", ALL)
    run("first", DONE, **MEGATRON, parallelism={"expert": 2})
    resume = {"resumeFrom": "first", "resume": "Run"}
    native = run("native", ALL, parallelism={"pipeline": 2}, checkpoint=resume)
    megatron = run("megatron", ALL, **MEGATRON, parallelism={"tensor": 2}, checkpoint=resume)
    losses = {step.step: step.loss for step in read_steps(runs.volume / "whole")}
    for job, exported in (("native", native), ("megatron", megatron)):
        assert [step.loss for step in read_steps(runs.volume / job)] == pytest.approx(
            [losses[step] for step in range(DONE + 1, ALL + 1)], rel=1e-5
        )
        assert exported.keys() == whole.keys()
        assert max((exported[name] - whole[name]).abs().max().item() for name in whole) < 1e-5
