"""The environment of a launcher, and the messages where it is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moejob_api.contract.pod_environment import BadEnvironment, read_environment
from moejob_api.contract.pods import PodOutcome, TerminationMessage
from moejob_trainer.launcher.pod import TrainerPod
from trainer.launcher.launchers import Gang


def environment(**changes: str | None) -> dict[str, str]:
    whole = Gang(Path("/nowhere"), nodes=4, ranks=8).pod_environment(index=2, attempt=7) | {
        "MOEJOB_PROGRESS_PORT": "9400"
    }
    return {name: value for name, value in (whole | changes).items() if value is not None}


def test_a_pod_is_what_its_environment_says() -> None:
    pod = read_environment(TrainerPod, environment())
    assert (pod.attempt, pod.index, pod.nodes, pod.world_size, pod.first_rank) == (7, 2, 4, 32, 16)
    assert (pod.run_folder, pod.progress_port) == (Path("/nowhere/run"), 9400)
    assert pod.spec.training.max_steps == 100
    assert not pod.is_first


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        pytest.param("127.0.0.2", "127.0.0.2", id="loopback address"),
        pytest.param("localhost", "localhost", id="loopback name"),
        pytest.param("job-trainer-1-00000.job.default.svc", "", id="pod"),
        pytest.param("10.1.2.3", "", id="address of a pod"),
    ],
)
def test_only_a_run_on_one_machine_listens_on_loopback(host: str, expected: str) -> None:
    assert read_environment(TrainerPod, environment(MOEJOB_HOST=host)).listens_on == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"MOEJOB_UID": None}, "MOEJOB_UID is not set", id="missing"),
        pytest.param({"MOEJOB_UID": ""}, "MOEJOB_UID: String should have at least 1 character", id="empty"),
        pytest.param({"MOEJOB_NODES": "two"}, "MOEJOB_NODES: Input should be a valid integer", id="no number"),
        pytest.param({"MOEJOB_INDEX": "4"}, "MOEJOB_INDEX is 4, but MOEJOB_NODES is 4", id="outside the gang"),
        pytest.param({"MOEJOB_ROLE": "rollout"}, "MOEJOB_ROLE: Input should be", id="another role"),
        pytest.param({"MOEJOB_SPEC": "{"}, "MOEJOB_SPEC: is not JSON", id="broken spec"),
        pytest.param({"MOEJOB_SPEC": "[]"}, "MOEJOB_SPEC: spec", id="spec that is a list"),
        pytest.param({"MOEJOB_SPEC": '{"method": "SFT"}'}, "spec.model: is missing", id="incomplete spec"),
        pytest.param(
            {"MOEJOB_SECRET": None, "MOEJOB_HOST": "10.1.2.3"}, "MOEJOB_SECRET is not set, and 10.1.2.3", id="no secret"
        ),
        pytest.param({"MOEJOB_PROGRESS_PORT": "0"}, "MOEJOB_PROGRESS_PORT: Input should be greater", id="port 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, str | None], said: str) -> None:
    with pytest.raises(BadEnvironment) as raised:
        read_environment(TrainerPod, environment(**changes))
    assert said in str(raised.value)


def test_everything_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(BadEnvironment, match="MOEJOB_UID is not set; MOEJOB_HOST is not set"):
        read_environment(TrainerPod, environment(MOEJOB_UID=None, MOEJOB_HOST=None))


def test_the_command_ends_with_78_and_says_what_is_missing(tmp_path: Path) -> None:
    word = tmp_path / "word"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MOEJOB_")}
    command = [sys.executable, "-m", "moejob_trainer.launcher", "--last-word", str(word)]
    assert subprocess.run(command, env=bare, check=False).returncode == 78
    said = TerminationMessage.model_validate_json(word.read_bytes())
    assert said.outcome is PodOutcome.BAD_CONFIGURATION
    assert "MOEJOB_SPEC is not set" in said.message
