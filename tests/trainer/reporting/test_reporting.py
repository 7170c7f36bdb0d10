"""What is told of a step: in the step log, to the sinks, and to the launcher."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from builders import spec
from moejob_api.contract import PodProgress, RunProgress
from moejob_trainer.beats import BOARD, Beats, Board
from moejob_trainer.engine import UpdateResult
from moejob_trainer.fencing import Claim
from moejob_trainer.launcher.metrics import exposition
from moejob_trainer.reporting import STEP_LOG, Ranks, Reporter, Teller, ranks_of
from moejob_trainer.starting import Start
from moejob_trainer.tracking import Background, Tracker
from trainer.reporting.runs import DEADLINE_SECONDS, Kept, updated

GPUS = Ranks(4, has_gpus=True, peak_flops_per_second=1e12)


def _two_seconds_a_step() -> Callable[[], float]:
    # Asked before the first step, then twice a step: as it ends, and when it has been told of.
    times = (100.0 + 2.0 * ((asked + 1) // 2) for asked in count())
    return lambda: next(times)


class Told:
    """A run of which something is told, and what arrives."""

    def __init__(self, folder: Path, ranks: Ranks = GPUS, *, is_first: bool = True) -> None:
        self.folder, self.board, self.kept = folder, Board(folder / "board", 1), Kept()
        self.saved: tuple[int | None, float | None, float] = (4, 1.5, 0.25)
        self.tracker = Tracker([Background("kept", lambda: self.kept)], DEADLINE_SECONDS)
        beats = Beats.for_rank({BOARD: str(self.board.folder), "LOCAL_RANK": "0"})
        self.reporter = Reporter(
            Teller(folder, beats, Claim(3, 1), self.tracker, is_first=is_first),
            total_steps=10,
            ranks=ranks,
            saved=lambda: self.saved,
            epoch=lambda: 0.5,
            waited=lambda: 0.125,
            evaluate=lambda step: {"evalLoss": 2.0} if step == 2 else {},
            clock=_two_seconds_a_step(),
        )
        self.reporter.begin()

    def report(self, step: int, *results: UpdateResult) -> dict[str, Any]:
        """The line of that step."""
        self.reporter.report(step, results)
        text = (self.folder / STEP_LOG).read_text().splitlines()[-1]
        line: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
        return line

    def run(self) -> RunProgress:
        """What the launcher hears."""
        heard = self.board.run()
        assert heard is not None
        return heard


def test_a_line_says_how_fast_and_how_well_the_step_was_learned(tmp_path: Path) -> None:
    line = Told(tmp_path).report(2, updated(flops=4e12, metrics={"entropy": 1.25, "dropRate": 0.1}))
    assert line.pop("time") > 0
    assert line == {
        "step": 2,
        "epoch": 0.5,
        "loss": 2.5,
        "gradNorm": 0.5,
        "learningRate": 1e-4,
        "applied": True,
        "tokens": 1000,
        "seconds": 2.0,
        "tokensPerSecond": 500.0,
        "tokensPerSecondPerGpu": 125.0,
        # 4e12 in two seconds on four.
        "tflopsPerGpu": 0.5,
        "mfu": 0.5,
        "dataWaitSeconds": 0.125,
        "checkpointStallSeconds": 0.25,
        "attempt": 3,
        "restart": 1,
        "entropy": 1.25,
        "dropRate": 0.1,
        "evalLoss": 2.0,
    }


def test_only_the_first_line_after_a_start_says_how_the_start_went(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.reporter.begin(Start(0.5, 0.0, 4.0, 2.0, 8.0004))
    first, second = told.report(1, updated()), told.report(2, updated())
    parts = ("endingSeconds", "importSeconds", "meetingSeconds", "joiningSeconds", "loadingSeconds")
    assert [first[part] for part in parts] == [0.5, 0.0, 4.0, 2.0, 8.0]
    assert not second.keys() & set(parts)


def test_a_step_of_several_updates_has_done_the_work_of_all(tmp_path: Path) -> None:
    line = Told(tmp_path).report(1, updated(flops=1e12), updated(loss=2.0, flops=3e12, is_applied=False))
    assert (line["tokens"], line["mfu"], line["loss"], line["applied"]) == (2000, 0.5, 2.0, False)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        pytest.param({"accelerator": "CPU", "cpu": 1, "memory": "8Gi"}, Ranks(8), id="a CPU has no peak"),
        pytest.param({"gpuType": "H200"}, Ranks(8, has_gpus=True, peak_flops_per_second=989e12), id="H200"),
        pytest.param({}, Ranks(8, has_gpus=True), id="a GPU that the job does not name"),
    ],
)
def test_speed_is_measured_against_the_peak_of_the_gpu_that_the_job_names(
    resources: dict[str, Any], expected: Ranks
) -> None:
    assert ranks_of(spec(resources=resources).resources, 8) == expected


def test_without_a_peak_there_is_no_share_of_it(tmp_path: Path) -> None:
    told = Told(tmp_path, Ranks(4))
    line = told.report(1, updated(flops=4e12))
    assert line.keys().isdisjoint({"mfu", "tflopsPerGpu"})
    assert told.run().mfu is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_and_ends_nothing(tmp_path: Path, loss: float) -> None:
    told = Told(tmp_path)
    line = told.report(1, updated(loss=loss, gradient_norm=math.nan, is_applied=False))
    assert (line["loss"], line["gradNorm"], line["applied"]) == (None, None, False)
    assert (told.run().step, told.run().loss) == (1, None)


def test_the_launcher_shows_the_run(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.report(1, updated(flops=4e12, metrics={"reward": 0.75, "mtpLoss": 3.5}))
    shown = exposition(PodProgress(attempt=1, index=0, run=told.run())).splitlines()
    assert {
        "moejob_step 1",
        "moejob_total_steps 10",
        "moejob_epoch 0.5",
        "moejob_loss 2.5",
        "moejob_mtp_loss 3.5",
        "moejob_reward 0.75",
        "moejob_learning_rate 0.0001",
        "moejob_gradient_norm 0.5",
        "moejob_tokens_per_second_per_gpu 125.0",
        "moejob_mfu_ratio 0.5",
        "moejob_last_checkpoint_step 4",
        "moejob_save_seconds 1.5",
    } <= set(shown)


def test_the_launcher_hears_how_long_its_ranks_have_done_steps(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.report(7, updated())
    assert told.run().stepping_seconds == 2.0
    told.report(8, updated())
    assert told.run().stepping_seconds == 4.0


def test_the_last_word_of_a_run_names_its_last_checkpoint(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.report(10, updated())
    assert told.run().last_checkpoint_step == 4
    told.saved = (10, 2.5, 0.25)
    told.reporter.finish()
    assert (told.run().step, told.run().last_checkpoint_step, told.run().save_seconds) == (10, 10, 2.5)
    assert told.run().loss == 2.5


def test_a_run_that_has_only_its_export_left_says_where_it_is(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.saved = (10, None, 0.0)
    told.reporter.finish()
    assert told.run() == RunProgress(step=10, total_steps=10, last_checkpoint_step=10)


def test_sinks_are_sent_every_step(tmp_path: Path) -> None:
    told = Told(tmp_path)
    with told.tracker:
        for step in (1, 2, 3):
            assert told.report(step, updated())["seconds"] == 2.0
    assert told.kept.steps == [1, 2, 3]


def test_only_the_first_rank_tells(tmp_path: Path) -> None:
    told = Told(tmp_path, is_first=False)
    with told.tracker:
        told.reporter.report(1, [updated()])
    told.reporter.finish()
    assert not (tmp_path / STEP_LOG).exists()
    assert (told.kept.steps, told.board.run()) == ([], None)
    # But it lives.
    assert told.board.heard()[0].step == 1
