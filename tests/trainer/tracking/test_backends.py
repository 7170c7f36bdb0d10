"""Every tracker backend: what it receives, how it resumes after a restart, and the message without it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from tensorboardX.proto.event_pb2 import Event, SessionLog
from wandb.proto import wandb_internal_pb2

from builders import spec
from moejob_api.job.lifecycle import MLflow, Trackio, Wandb
from moejob_trainer.runtime.redaction import REDACTED
from moejob_trainer.tracking import BackgroundBackend, Tracker, open_tracker
from moejob_trainer.tracking.mlflow_run import MLflowRun
from moejob_trainer.tracking.tensorboard_events import TensorBoardEvents
from moejob_trainer.tracking.tracker import backend_openers
from moejob_trainer.tracking.trackio_inbox import TrackioInbox
from moejob_trainer.tracking.wandb_run import WandbRun
from trainer.tracking.runs import DEADLINE_SECONDS, numbers, tracked

ROOT = Path(__file__).parents[3]
SERVER_SECONDS = 180.0
WANDB = {"wandb": {"project": "moe", "entity": "team", "group": "night"}}
MLFLOW = {"mlflow": {"trackingUri": "http://mlflow:5000", "experiment": "moe"}}


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


def test_trackers_get_no_secret_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "value-of-the-pod")
    rewards = [{"url": "https://me:pass-word@judge.example:8080/score?token=in-the-query#x", "weight": 0.5}]
    job = spec(
        method="GRPO",
        data={"train": [{"source": "pvc://a/b.jsonl", "format": "Prompts"}]},
        grpo={"rewards": rewards},
        resources={
            "env": [
                {"name": "JUDGE_API_KEY", "value": "in-a-variable"},
                {"name": "NCCL_DEBUG", "value": "INFO"},
                {"name": "HEADER", "value": "Bearer value-of-the-pod"},
            ]
        },
    )
    fields = replace(tracked(tmp_path), spec=job).describe_spec()
    text = json.dumps(fields)
    assert fields["grpo"]["rewards"][0]["url"] == "https://judge.example:8080/score"
    assert [variable["value"] for variable in fields["resources"]["env"]] == [REDACTED, "INFO", f"Bearer {REDACTED}"]
    for secret in ("pass-word", "in-the-query", "in-a-variable", "value-of-the-pod"):
        assert secret not in text


@pytest.mark.parametrize("part", ["tensorboard", "trackio"])
def test_what_trackers_write_has_no_query_of_a_reward(tmp_path: Path, part: str) -> None:
    rewards = [{"url": "https://judge.example/score?token=in-the-query"}]
    data = {"train": [{"source": "pvc://a/b.jsonl", "format": "Prompts"}]}
    job = spec(method="GRPO", data=data, grpo={"rewards": rewards})
    run = replace(tracked(tmp_path), spec=job)
    backend = TensorBoardEvents(run) if part == "tensorboard" else TrackioInbox(run, Trackio(project="p"))
    backend.write(numbers(1))
    backend.close(has_failed=False)
    written = b"".join(path.read_bytes() for path in (tmp_path / part).rglob("*") if path.is_file())
    assert b"judge.example/score" in written
    assert b"in-the-query" not in written


def test_a_restart_within_the_same_second_writes_a_file_of_its_own(tmp_path: Path) -> None:
    for restart, step in ((0, 9), (1, 5)):
        backend = TensorBoardEvents(tracked(tmp_path, restart=restart))
        backend.write(numbers(step))
        backend.close(has_failed=False)
    first, second = sorted((tmp_path / "tensorboard").iterdir(), key=lambda file: file.name[-3:])
    assert [event.step for event in _events(first)][1:] == [9, 9, 9]
    # Where it starts, TensorBoard forgets what came later before.
    assert next(e for e in _events(second) if e.HasField("session_log")).step == 5


def test_wandb_continues_with_the_run_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for restart, step in ((0, 5), (1, 3)):
        run = tracked(tmp_path, restart=restart, **WANDB)
        backend = WandbRun(run, Wandb(project="moe", entity="team", group="night"))
        backend.write(numbers(step, loss=1.0 / step, **{"evalMean@4": 0.5}))
        backend.write(numbers(step + 1, loss=0.5))
        backend.close(has_failed=restart == 0)
        # The folder of an offline run is named by the second.
        time.sleep(1.0)

    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    found = [[*wandb_records(file)] for file in files]
    for records, step, code in zip(found, (5, 3), (1, 0), strict=True):
        (run_there,) = (record.run for record in records if record.HasField("run"))
        assert (run_there.run_id, run_there.display_name) == ("uid-7", "tiny")
        assert (run_there.project, run_there.entity, run_there.run_group) == ("moe", "team", "night")
        assert (
            json.loads({part.key: part.value_json for part in run_there.config.update}["tracking"])["wandb"]
            == (WANDB["wandb"])
        )
        rows = [
            {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        assert [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows] == [
            {"step": step, "loss": 1.0 / step, "evalMean@4": 0.5},
            {"step": step + 1, "loss": 0.5},
        ]
        axes = [record.metric for record in records if record.HasField("metric")]
        assert [(axis.name or axis.glob_name, axis.step_metric) for axis in axes] == [("step", ""), ("*", "step")]
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [code]


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield what an offline run has kept: a log in blocks, of which a record may span several."""
    block, header, whole, last = 32768, 7, 1, 4
    data, record = file.read_bytes(), b""
    # The name of the format stands before the first record, in the first block.
    place = header
    while place < len(data):
        left = block - place % block
        if left < header:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + header : place + header + length]
        place += header + length
        if kind in (whole, last):
            yield wandb_internal_pb2.Record.FromString(record)  # type: ignore[attr-defined]
            record = b""


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real one, on loopback."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    uri, log = f"http://127.0.0.1:{port}", folder / "server.log"
    # Jobs of the server's own need another package, and are no part of tracking.
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [
        *(
            str(ROOT / ".venv/mlflow/bin/mlflow"),
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--workers",
            "1",
        ),
        *("--backend-store-uri", f"sqlite:///{folder}/runs.db", "--default-artifact-root", f"{folder}/artifacts"),
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + SERVER_SECONDS
        while not answers(f"{uri}/health"):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield uri
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=SERVER_SECONDS).is_success
    except httpx.TransportError:
        return False


@pytest.mark.thorough
def test_mlflow_continues_with_the_run_of_the_job(
    mlflow_server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", raising=False)
    settings = MLflow(tracking_uri=mlflow_server, experiment="moe")
    asked = {"mlflow": {"trackingUri": mlflow_server, "experiment": "moe"}}
    server = MlflowClient(tracking_uri=mlflow_server)

    first = MLflowRun(tracked(tmp_path, **asked), settings)
    # A server refuses `@` and `//`, and with them all numbers of the step.
    first.write(numbers(5, **{"loss": 1.0, "evalMean@4": 0.5, "reward/http://score:80/a": 0.25}))
    first.close(has_failed=True)
    (run,) = runs(server)
    assert (run.info.run_name, run.info.status) == ("tiny", "FAILED")
    assert run.data.params["tracking.mlflow.trackingUri"] == mlflow_server
    assert run.data.params["data.maxLength"] == str(tracked(tmp_path).spec.data.max_length)
    assert run.data.metrics == {"loss": 1.0, "evalMean-4": 0.5, "reward/http:-score:80/a": 0.25}

    # The job is sent once: a server refuses a parameter that changed.
    again = MLflowRun(tracked(tmp_path, restart=1, tensorboard=False, **asked), settings)
    (run,) = runs(server)
    assert run.info.status == "RUNNING"
    again.write(numbers(4, loss=0.75))
    again.close(has_failed=False)
    (run,) = runs(server)
    assert run.info.status == "FINISHED"
    history = server.get_metric_history(run.info.run_id, "loss")
    assert {(one.step, one.value, one.timestamp) for one in history} == {(5, 1.0, 1005000), (4, 0.75, 1004000)}
    assert capfd.readouterr().out == ""


def runs(server: MlflowClient) -> list[Run]:
    experiment = server.get_experiment_by_name("moe")
    assert experiment is not None
    return [*server.search_runs([experiment.experiment_id])]


@pytest.mark.parametrize(("tracking", "package"), [(WANDB, "wandb"), (MLFLOW, "mlflow")])
def test_without_its_package_a_sink_says_so_once(
    tmp_path: Path, tracking: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said: list[str] = []
    (opened,) = (
        opened
        for name, opened in backend_openers(tracked(tmp_path, **tracking)).items()
        if name == f"tracking.{package}"
    )
    with Tracker([BackgroundBackend(f"tracking.{package}", opened, said.append)], DEADLINE_SECONDS) as backends:
        backends.write(1, {"loss": 1.0})
    assert said[0] == (
        f"tracking.{package}: this image has no package {package}; install it in the image or remove the tracker from "
        "spec.tracking; the run continues, and steps.jsonl in the run folder has all of them"
    )


def test_a_job_gets_the_sinks_it_asks_for(tmp_path: Path) -> None:
    assert [*backend_openers(tracked(tmp_path))] == ["tracking.tensorboard"]
    assert [*backend_openers(tracked(tmp_path, tensorboard=False, **WANDB, **MLFLOW, trackio={}))] == [
        "tracking.wandb",
        "tracking.mlflow",
        "tracking.trackio",
    ]


def test_only_the_first_rank_sends(tmp_path: Path) -> None:
    for is_first in (False, True):
        with open_tracker(tracked(tmp_path), is_first=is_first) as backends:
            backends.write(1, {"loss": 1.0})
        assert (tmp_path / "tensorboard").exists() is is_first
