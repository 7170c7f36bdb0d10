"""Every tracker backend: what it receives, how it resumes after a restart, and the message without it."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from moejob_api.job.lifecycle import MLflow, Wandb
from moejob_trainer.tracking import Background, Tracker, tracker
from moejob_trainer.tracking.mlflow_run import MLflowRun
from moejob_trainer.tracking.tensorboard_events import TensorBoardEvents
from moejob_trainer.tracking.tracker import asked_for
from moejob_trainer.tracking.wandb_run import WandbRun
from trainer.tracking.runs import DEADLINE_SECONDS, numbers, tracked

WANDB = {"wandb": {"project": "moe", "entity": "team", "group": "night"}}
MLFLOW = {"mlflow": {"trackingUri": "http://mlflow:5000", "experiment": "moe"}}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to put packages into that are in no image of ours."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("wandb", "mlflow")]:
        del sys.modules[name]


def _events(file: Path) -> Iterator[Event]:
    """The records of an event file: length and its checksum, the event and its checksum."""
    data, place = file.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        yield Event.FromString(data[place + 12 : place + 12 + length])
        place += 16 + length


def test_tensorboard_reads_the_numbers_of_every_step(tmp_path: Path) -> None:
    backend = TensorBoardEvents(tracked(tmp_path))
    backend.write(numbers(1, loss=2.0, gradNorm=0.5))
    backend.write(numbers(2, loss=1.5))
    (file,) = (tmp_path / "tensorboard").iterdir()
    # Before it is closed: who watches does not wait for the end.
    version, start, job, *steps = _events(file)
    backend.close(has_failed=False)
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (1, SessionLog.START)
    (text,) = job.summary.value
    assert text.tag == "tiny/text_summary"
    assert b'"maxLength"' in text.tensor.string_val[0]
    found = [(event.step, event.wall_time, {v.tag: v.simple_value for v in event.summary.value}) for event in steps]
    assert found == [(1, 1001.0, {"loss": 2.0, "gradNorm": 0.5}), (2, 1002.0, {"loss": 1.5})]


def test_a_restart_within_the_same_second_writes_a_file_of_its_own(tmp_path: Path) -> None:
    for restart, step in ((0, 9), (1, 5)):
        backend = TensorBoardEvents(tracked(tmp_path, restart=restart))
        backend.write(numbers(step))
        backend.close(has_failed=False)
    first, second = sorted((tmp_path / "tensorboard").iterdir(), key=lambda file: file.name[-3:])
    assert [event.step for event in _events(first)][1:] == [9, 9, 9]
    # Where it starts, TensorBoard forgets what came later before.
    assert next(e for e in _events(second) if e.HasField("session_log")).step == 5


_FAKE_WANDB = """
calls = []
class Settings(dict):
    pass
class Run:
    def define_metric(self, name, **how): calls.append(("define_metric", name, how))
    def log(self, row): calls.append(("log", row))
    def finish(self, exit_code): calls.append(("finish", exit_code))
def init(**how):
    calls.append(("init", how))
    return Run()
"""


def test_wandb_goes_on_with_the_run_of_the_job(packages: Path, tmp_path: Path) -> None:
    (packages / "wandb.py").write_text(_FAKE_WANDB)
    run = tracked(tmp_path, **WANDB)
    backend = WandbRun(run, Wandb(project="moe", entity="team", group="night"))
    backend.write(numbers(5, loss=1.0))
    backend.close(has_failed=True)
    (_, how), *calls = sys.modules["wandb"].calls
    assert {name: how[name] for name in ("id", "resume", "name", "project", "entity", "group", "dir")} == {
        "id": "uid-7",
        "resume": "allow",
        "name": "tiny",
        "project": "moe",
        "entity": "team",
        "group": "night",
        "dir": str(tmp_path),
    }
    assert how["config"]["tracking"]["wandb"] == WANDB["wandb"]
    assert calls == [
        ("define_metric", "step", {"hidden": True}),
        ("define_metric", "*", {"step_metric": "step"}),
        ("log", {"step": 5, "loss": 1.0}),
        ("finish", 1),
    ]


# A server of one experiment, as far as the client asks it anything.
_FAKE_MLFLOW = """
import os
from types import SimpleNamespace as Bag
calls, runs = [], {}
class MlflowClient:
    def __init__(self, tracking_uri): calls.append(("client", tracking_uri))
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): return name
    def search_runs(self, experiments, filter, max_results):
        return [run for run in runs.values() if filter == f"tags.`moejob.uid` = '{run.tags['moejob.uid']}'"]
    def create_run(self, experiment, run_name, tags):
        runs[run_name] = Bag(info=Bag(run_id=f"{experiment}/{run_name}"), tags=tags)
        return runs[run_name]
    def update_run(self, run, status): calls.append(("update_run", run, status))
    def log_batch(self, run, metrics=(), params=()):
        assert len(params) <= 100
        calls.append(("log_batch", run, [*metrics], {key: value for key, value in params}))
    def set_terminated(self, run, status):
        calls.append(("set_terminated", run, status))
        if os.environ.get("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT") != "true":
            print("View run", run)
"""
_FAKE_ENTITIES = """
def Metric(*values): return values
def Param(key, value): return key, value
"""


def test_mlflow_goes_on_with_the_run_of_the_job(
    packages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", raising=False)
    (packages / "mlflow").mkdir()
    (packages / "mlflow" / "__init__.py").write_text(_FAKE_MLFLOW)
    (packages / "mlflow" / "entities.py").write_text(_FAKE_ENTITIES)
    settings = MLflow(tracking_uri="http://mlflow:5000", experiment="moe")
    first = MLflowRun(tracked(tmp_path, **MLFLOW), settings)
    first.write(numbers(5, **{"loss": 1.0, "evalMean@4": 0.5, "reward/http://score:80/a": 0.25}))
    first.close(has_failed=False)
    calls = sys.modules["mlflow"].calls
    assert calls[0] == ("client", "http://mlflow:5000")
    parameters: dict[str, Any] = {}
    for _, run, _, some in (call for call in calls if call[0] == "log_batch"):
        assert run == "moe/tiny"
        parameters |= some
    assert parameters["tracking.mlflow.trackingUri"] == "http://mlflow:5000"
    assert calls[-2:] == [
        # A server refuses `@` and `//`, and with them all numbers of the step.
        (
            "log_batch",
            "moe/tiny",
            [
                ("loss", 1.0, 1005000, 5),
                ("evalMean-4", 0.5, 1005000, 5),
                ("reward/http:-score:80/a", 0.25, 1005000, 5),
            ],
            {},
        ),
        ("set_terminated", "moe/tiny", "FINISHED"),
    ]
    calls.clear()
    # The job is sent once: MLflow refuses a parameter that changed.
    MLflowRun(tracked(tmp_path, restart=1, **MLFLOW), settings)
    assert calls == [("client", "http://mlflow:5000"), ("update_run", "moe/tiny", "RUNNING")]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("tracking", "package"), [(WANDB, "wandb"), (MLFLOW, "mlflow")])
def test_without_its_package_a_sink_says_so_once(tmp_path: Path, tracking: dict[str, Any], package: str) -> None:
    said: list[str] = []
    (opened,) = (
        opened for name, opened in asked_for(tracked(tmp_path, **tracking)).items() if name == f"tracking.{package}"
    )
    with Tracker([Background(f"tracking.{package}", opened, said.append)], DEADLINE_SECONDS) as backends:
        backends.write(1, {"loss": 1.0})
    assert said[0] == (
        f"tracking.{package}: this image has no package {package}; install it in the image or remove the tracker from "
        "spec.tracking; the run continues, and steps.jsonl in the run folder has all of them"
    )


def test_a_job_gets_the_sinks_it_asks_for(tmp_path: Path) -> None:
    assert [*asked_for(tracked(tmp_path))] == ["tracking.tensorboard"]
    assert [*asked_for(tracked(tmp_path, tensorboard=False, **WANDB, **MLFLOW))] == [
        "tracking.wandb",
        "tracking.mlflow",
    ]


def test_only_the_first_rank_sends(tmp_path: Path) -> None:
    for is_first in (False, True):
        with tracker(tracked(tmp_path), is_first=is_first) as backends:
            backends.write(1, {"loss": 1.0})
        assert (tmp_path / "tensorboard").exists() is is_first
