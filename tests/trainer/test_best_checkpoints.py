"""Real runs that get worse: the best checkpoint is saved, kept, remembered and exported, and a run may end early."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moejob_trainer.checkpoint_export.run import BEST, read_stored_run
from moejob_trainer.checkpoint_export.run_export import ExportOptions, export_run
from moejob_trainer.checkpoints.manifest import EvaluationFacts, read_manifest
from moejob_trainer.checkpoints.names import parse_step_folder
from trainer.held_out_loss import held_out_loss
from trainer.runs import Runs, StartedRanks, await_result

# At this rate the second step is the best one, in every layout.
WORSENING: dict[str, Any] = {"maxSteps": 5, "evalEvery": 1, "optimizer": {"learningRate": 0.1}}
JOB: dict[str, Any] = {
    "data": {"eval": [{"source": "moejob/tiny-chats", "format": "Chat", "split": "test"}]},
    "training": WORSENING,
    # Nothing is saved before the end but for its evaluation.
    "checkpoint": {"everySteps": 1000, "keep": 1, "keepBest": 1, "exportHuggingFace": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two stages": {"parallelism": {"pipeline": 2}},
    "shares of the weights": {"parallelism": {"data": 2}, "memory": {"sharding": "FSDP"}},
}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path / "volume")
    yield started
    started.close()


def read_lines(run: StartedRanks) -> list[dict[str, Any]]:
    """The lines of all whole steps."""
    log = run.folder / "steps.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_evaluations(run: StartedRanks) -> dict[str, EvaluationFacts | None]:
    """The evaluation in the manifest of each complete checkpoint."""
    found = [path for path in sorted((run.folder / "checkpoints").iterdir()) if (path / "complete.json").exists()]
    return {path.name.partition(".")[0]: read_manifest(path).facts.evaluation for path in found}


def find_evaluation_corpus(run: StartedRanks) -> Path:
    """The corpus of the evaluation data."""
    reports = run.folder.glob("data/*/report.json")
    return next(path.parent for path in reports if json.loads(path.read_text())["split"] == "test")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_checkpoint_is_kept_and_is_what_the_run_exports(layout: str, runs: Runs, tmp_path: Path) -> None:
    run = runs.run_to_end(**JOB, **LAYOUTS[layout])
    told = read_lines(run)
    losses = [line["evalLoss"] for line in told]
    assert losses.index(min(losses)) == 1
    assert [(line["evalScore"], line["bestStep"], line["bestScore"]) for line in told] == [
        (loss, 1 if step == 1 else 2, min(losses[:step])) for step, loss in enumerate(losses, 1)
    ]
    assert read_evaluations(run) == {"step-2": EvaluationFacts(measure="evalLoss", value=losses[1]), "step-5": None}
    # Transformers makes of the export what the run made of the weights of its second step.
    assert held_out_loss(run.folder / "export", find_evaluation_corpus(run)) == pytest.approx(losses[1], rel=1e-5)
    assert "step 2" in export_run(read_stored_run(run.folder, BEST), ExportOptions(tmp_path / "out"))
    exported, expected = (_tensors(folder) for folder in (tmp_path / "out", run.folder / "export"))
    assert exported.keys() == expected.keys()
    assert [name for name, one in expected.items() if not torch.equal(exported[name], one)] == []


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_the_best_that_it_had(runs: Runs) -> None:
    often = JOB | {"checkpoint": JOB["checkpoint"] | {"everySteps": 1, "async": False, "exportHuggingFace": False}}
    endless = often | {"training": WORSENING | {"maxSteps": 10_000}, "parallelism": {"expert": 2}}
    run = runs.start(attempt=1, **endless)

    def has_saved_more() -> bool:
        assert run.is_running(), run.read_log()
        found = [parse_step_folder(path.parent.name) for path in run.folder.glob("checkpoints/*/complete.json")]
        return any(folder is not None and folder.step >= 4 for folder in found)

    await_result(has_saved_more, "the checkpoint of step 4")
    run.kill()
    done = max(line["step"] for line in read_lines(run))
    resumed = runs.run_to_end(attempt=2, **(endless | {"training": WORSENING | {"maxSteps": done + 2}}))
    told = read_lines(resumed)
    best = told[1]["evalLoss"]
    assert {line["attempt"] for line in told} == {1, 2}
    assert best == min(line["evalLoss"] for line in told)
    assert {(line["bestStep"], line["bestScore"]) for line in told[1:]} == {(2, best)}
    assert read_evaluations(resumed) == {
        "step-2": EvaluationFacts(measure="evalLoss", value=best),
        f"step-{done + 2}": None,
    }
    # What was known before shows from the first step on.
    shown = resumed.board.read_run()
    assert shown is not None
    assert (shown.measures["bestStep"], shown.measures["bestScore"]) == (2, best)


@pytest.mark.slow
def test_another_job_that_goes_on_with_a_run_begins_its_own_order(runs: Runs) -> None:
    short = JOB | {"checkpoint": JOB["checkpoint"] | {"exportHuggingFace": False}}
    runs.run_to_end("first", **(short | {"training": WORSENING | {"maxSteps": 3}}))
    going_on = short["checkpoint"] | {"resumeFrom": "first", "resume": "Run"}
    second = runs.run_to_end("second", **(short | {"checkpoint": going_on}))
    told = read_lines(second)
    assert [line["step"] for line in told] == [4, 5]
    assert told[0]["bestStep"] == 4
    # Whatever the first job had: its checkpoints are not in this folder.
    assert "step-4" in read_evaluations(second)
    assert all(math.isfinite(line["bestScore"]) for line in told)


# --- early stop -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep_best", "exported"),
    [pytest.param(None, 4, id="the last weights"), pytest.param(1, 2, id="the best weights")],
)
def test_a_run_that_no_longer_improves_ends_well_and_exports(keep_best: int | None, exported: int, runs: Runs) -> None:
    stopping = WORSENING | {"maxSteps": 8, "earlyStop": {"patience": 2}}
    job = JOB | {"training": stopping, "checkpoint": JOB["checkpoint"] | {"keepBest": keep_best}}
    run = runs.run_to_end(**job, parallelism={"pipeline": 2})
    told = read_lines(run)
    assert [line["evaluationsWithoutImprovement"] for line in told] == [0, 0, 1, 2]
    assert [line.get("stoppedEarly") for line in told] == [None, None, None, True]
    assert "stopped early at step 4 of 8: 2 evaluations in a row without a better evalLoss than" in run.read_log()
    assert "step-4" in read_evaluations(run)
    assert held_out_loss(run.folder / "export", find_evaluation_corpus(run)) == pytest.approx(
        told[exported - 1]["evalLoss"], rel=1e-5
    )
    shown = run.board.read_run()
    assert shown is not None
    assert (shown.step, shown.total_steps, shown.last_checkpoint_step, shown.measures["stoppedEarly"]) == (4, 4, 4, 1)
    # What is over stays over, however often it is started.
    again = runs.run_to_end(attempt=2, **job, parallelism={"pipeline": 2})
    assert len(read_lines(again)) == 4
    shown = again.board.read_run()
    assert shown is not None
    assert (shown.step, shown.total_steps, shown.measures["stoppedEarly"]) == (4, 4, 1)


@pytest.mark.slow
def test_a_run_that_is_killed_remembers_how_long_nothing_has_improved(runs: Runs) -> None:
    # Nothing but the first evaluation is an improvement of that size.
    stopping = WORSENING | {"maxSteps": 10_000, "earlyStop": {"patience": 12, "minimumImprovement": 100.0}}
    often = JOB["checkpoint"] | {"everySteps": 1, "async": False, "exportHuggingFace": False}
    job = JOB | {"training": stopping, "checkpoint": often, "parallelism": {"expert": 2}}
    run = runs.start(attempt=1, **job)
    await_result(lambda: [*run.folder.glob("checkpoints/step-2.*/complete.json")], "the checkpoint of step 2")
    run.kill()
    resumed = runs.run_to_end(attempt=2, **job)
    told = read_lines(resumed)
    assert {line["attempt"] for line in told} == {1, 2}
    assert [line["evaluationsWithoutImprovement"] for line in told if line["attempt"] == 2][-1] == 12
    assert told[-1]["step"] == 13


@pytest.mark.slow
def test_a_run_that_compares_nothing_writes_manifests_that_older_versions_read(runs: Runs) -> None:
    run = runs.run_to_end(training={"maxSteps": 1})
    (path,) = (run.folder / "checkpoints").iterdir()
    assert json.loads((path / "manifest.json").read_text())["facts"].keys() == {
        *("step", "attempt", "restart", "jobUid", "stateFormat", "layout", "versions", "data")
    }


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}
