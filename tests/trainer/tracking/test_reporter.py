"""Reports of a step: in the step log, to the tracker backends, and to the launcher."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from builders import spec
from moejob_api.contract.pods import PodProgress, RunProgress
from moejob_trainer.launcher.metrics import format_metrics
from moejob_trainer.runtime.fencing import FenceToken
from moejob_trainer.runtime.heartbeats import BOARD, Heartbeat, HeartbeatBoard
from moejob_trainer.runtime.start_timing import StartTiming
from moejob_trainer.tracking import BackgroundBackend, Tracker
from moejob_trainer.tracking.reporter import STEP_LOG, ProgressWriter, RankHardware, Reporter, rank_hardware
from moejob_trainer.training import UpdateResult
from trainer.tracking.runs import DEADLINE_SECONDS, Kept, updated

GPUS = RankHardware(4, has_gpus=True, peak_flops_per_second=1e12)


class Reported:
    """A run that is reported, and what arrives. A step takes two seconds, the evaluation after step 2 half a second."""

    def __init__(self, folder: Path, ranks: RankHardware = GPUS, *, is_first: bool = True) -> None:
        self.now = 100.0
        self.folder, self.board, self.kept = folder, HeartbeatBoard(folder / "board", 1), Kept()
        self.saved: tuple[int | None, float | None, float] = (4, 1.5, 0.25)
        self.tracker = Tracker([BackgroundBackend("kept", lambda: self.kept)], DEADLINE_SECONDS)
        heartbeat = Heartbeat.for_rank({BOARD: str(self.board.folder), "LOCAL_RANK": "0"})
        self.reporter = Reporter(
            ProgressWriter(folder, heartbeat, FenceToken(3, 1), self.tracker, is_first=is_first),
            total_steps=10,
            ranks=ranks,
            saved=lambda: self.saved,
            epoch=lambda: 0.5,
            waited=lambda: 0.125,
            evaluate=self._evaluated,
            clock=lambda: self.now,
        )
        self.reporter.start()

    def _evaluated(self, step: int) -> dict[str, float]:
        if step != 2:
            return {}
        self.now += 0.5
        return {"evalLoss": 2.0}

    def report(self, step: int, *results: UpdateResult) -> dict[str, Any]:
        """The line of that step."""
        self.now += 2.0
        self.reporter.report_step(step, results)
        text = (self.folder / STEP_LOG).read_text().splitlines()[-1]
        line: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
        return line

    def run(self) -> RunProgress:
        """Return the progress that the launcher reads."""
        heard = self.board.read_run()
        assert heard is not None
        return heard


def test_a_line_says_how_fast_and_how_well_the_step_was_learned(tmp_path: Path) -> None:
    line = Reported(tmp_path).report(2, updated(flops=4e12, metrics={"entropy": 1.25, "dropRate": 0.1}))
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
        "evaluateSeconds": 0.5,
    }


def test_only_the_first_line_after_a_start_says_how_the_start_went(tmp_path: Path) -> None:
    reported = Reported(tmp_path)
    reported.reporter.start(StartTiming(0.5, 0.0, 4.0, 2.0, 8.0004))
    first, second = reported.report(1, updated()), reported.report(2, updated())
    parts = ("endingSeconds", "importSeconds", "meetingSeconds", "joiningSeconds", "loadingSeconds")
    assert [first[part] for part in parts] == [0.5, 0.0, 4.0, 2.0, 8.0]
    assert not second.keys() & set(parts)


def test_a_step_of_several_updates_has_done_the_work_of_all(tmp_path: Path) -> None:
    line = Reported(tmp_path).report(1, updated(flops=1e12), updated(loss=2.0, flops=3e12, is_applied=False))
    assert (line["tokens"], line["mfu"], line["loss"], line["applied"]) == (2000, 0.5, 2.0, False)


def test_a_step_of_several_updates_says_their_means(tmp_path: Path) -> None:
    first = updated(
        loss=2.0,
        metrics={"entropy": 2.0, "kl": 0.5, "idleExperts": 7.0},
        weights={"loss": 1.0, "entropy": 1.0, "kl": 4.0},
    )
    # Nothing of it was compared with the reference model.
    second = updated(metrics={"entropy": 1.0, "idleExperts": 3.0}, loss=1.0, weights={"loss": 1.0, "entropy": 3.0})
    line = Reported(tmp_path).report(1, first, second)
    assert [line[name] for name in ("loss", "entropy", "kl", "idleExperts")] == [1.5, 1.25, 0.5, 3.0]


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        pytest.param({"accelerator": "CPU", "cpu": 1, "memory": "8Gi"}, RankHardware(8), id="a CPU has no peak"),
        pytest.param({"gpuType": "H200"}, RankHardware(8, has_gpus=True, peak_flops_per_second=989e12), id="H200"),
        pytest.param({}, RankHardware(8, has_gpus=True), id="a GPU that the job does not name"),
    ],
)
def test_speed_is_measured_against_the_peak_of_the_gpu_that_the_job_names(
    resources: dict[str, Any], expected: RankHardware
) -> None:
    assert rank_hardware(spec(resources=resources).resources, 8) == expected


def test_without_a_peak_there_is_no_share_of_it(tmp_path: Path) -> None:
    reported = Reported(tmp_path, RankHardware(4))
    line = reported.report(1, updated(flops=4e12))
    assert line.keys().isdisjoint({"mfu", "tflopsPerGpu"})
    assert reported.run().mfu is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_and_ends_nothing(tmp_path: Path, loss: float) -> None:
    reported = Reported(tmp_path)
    line = reported.report(1, updated(loss=loss, gradient_norm=math.nan, is_applied=False))
    assert (line["loss"], line["gradNorm"], line["applied"]) == (None, None, False)
    assert (reported.run().step, reported.run().loss) == (1, None)


def test_the_launcher_shows_the_run(tmp_path: Path) -> None:
    reported = Reported(tmp_path)
    reported.report(1, updated(flops=4e12, metrics={"reward": 0.75, "mtpLoss": 3.5}))
    shown = format_metrics(PodProgress(attempt=1, index=0, run=reported.run())).splitlines()
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


def test_prometheus_reads_every_other_number_of_the_step_log(tmp_path: Path) -> None:
    reported = Reported(tmp_path)
    reported.report(2, updated())
    measures = {
        "reward/http://score": 0.5,
        'reward/say "hi"\\': 0.25,
        "evalPass@4": 0.75,
        "syncSeconds": 1.5,
        "kl": math.nan,
    }
    reported.report(3, updated(metrics=measures | {f"reward/{'x' * 600}": 1.0}))
    run = reported.run()
    assert "reward" not in run.measures
    shown = format_metrics(PodProgress(attempt=1, index=0, run=run)).splitlines()
    assert "# TYPE moejob_reward_by_name gauge" in shown
    assert {
        'moejob_reward_by_name{name="http://score"} 0.5',
        'moejob_reward_by_name{name="say \\"hi\\"\\\\"} 0.25',
        'moejob_eval_pass{k="4"} 0.75',
        "moejob_sync_seconds 1.5",
        "moejob_step_seconds 2.0",
        "moejob_data_wait_seconds 0.125",
        "moejob_tokens_per_second 500.0",
        # Of the evaluation before: there is no newer one.
        "moejob_eval_loss 2.0",
        "moejob_evaluate_seconds 0.5",
    } <= set(shown)
    names = [line.split()[2] for line in shown if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert not any("nan" in line or "xxx" in line for line in shown)


def test_the_launcher_hears_how_long_its_ranks_have_done_steps(tmp_path: Path) -> None:
    reported = Reported(tmp_path)
    reported.report(7, updated())
    assert reported.run().stepping_seconds == 2.0
    reported.report(8, updated())
    assert reported.run().stepping_seconds == 4.0


def test_the_last_word_of_a_run_names_its_last_checkpoint(tmp_path: Path) -> None:
    reported = Reported(tmp_path)
    reported.report(10, updated())
    assert reported.run().last_checkpoint_step == 4
    reported.saved = (10, 2.5, 0.25)
    reported.reporter.report_end()
    assert (reported.run().step, reported.run().last_checkpoint_step, reported.run().save_seconds) == (10, 10, 2.5)
    assert reported.run().loss == 2.5


def test_a_run_that_has_only_its_export_left_says_where_it_is(tmp_path: Path) -> None:
    reported = Reported(tmp_path)
    reported.saved = (10, None, 0.0)
    reported.reporter.report_end()
    assert reported.run() == RunProgress(step=10, total_steps=10, last_checkpoint_step=10)


def test_sinks_are_sent_every_step(tmp_path: Path) -> None:
    reported = Reported(tmp_path)
    with reported.tracker:
        for step in (1, 2, 3):
            assert reported.report(step, updated())["seconds"] == 2.0
    assert reported.kept.steps == [1, 2, 3]


def test_only_the_first_rank_tells(tmp_path: Path) -> None:
    reported = Reported(tmp_path, is_first=False)
    with reported.tracker:
        reported.reporter.report_step(1, [updated()])
    reported.reporter.report_end()
    assert not (tmp_path / STEP_LOG).exists()
    assert (reported.kept.steps, reported.board.read_run()) == ([], None)
    # But it lives.
    assert reported.board.read()[0].step == 1


def test_a_start_cuts_the_half_line_that_the_one_before_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / STEP_LOG).write_text('{"step": 1}\n{"step": 2, "ep')
    Reported(tmp_path).report(2, updated())
    lines = (tmp_path / STEP_LOG).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "ended in half a line: its last 15 bytes were cut" in capfd.readouterr().err


def test_another_rank_leaves_the_step_log_alone(tmp_path: Path) -> None:
    (tmp_path / STEP_LOG).write_text('{"step": 2, "ep')
    Reported(tmp_path, is_first=False)
    assert (tmp_path / STEP_LOG).read_text() == '{"step": 2, "ep'
