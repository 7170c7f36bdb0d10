"""Engines beside ranks: children of the launcher that outlive a round of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from builders import spec
from moejob_api.contract.pod_environment import read_environment, spec_text
from moejob_api.contract.pods import Environment, RunPhase
from moejob_trainer.launcher.engine_processes import engine_commands
from moejob_trainer.launcher.pod import TrainerPod
from trainer.launcher.launchers import Gang, Launcher, await_ends, await_result, is_alive

Make = Callable[..., Gang]

# It has a worker, as vLLM has, and tells how it was started.
_ENGINE = """#!/bin/bash
folder=$(dirname "$0")
sleep 1000 &
echo "$$ $! $MOEJOB_ROLE $MOEJOB_INDEX $*" >>"$folder/started"
trap 'echo $$ >>"$folder/asked"; kill %1; exit 0' TERM
wait
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "engine"
    path.write_text(_ENGINE)
    path.chmod(0o755)
    yield path
    # A launcher that the test kills ends none of its children; real engines notice.
    note = path.with_name("started")
    for line in note.read_text().splitlines() if note.exists() else []:
        with suppress(ProcessLookupError):
            os.killpg(int(line.split()[0]), signal.SIGKILL)


def started(engine: Path, times: int) -> list[list[str]]:
    """Wait for that many starts; what each said."""
    note = engine.with_name("started")

    def look() -> list[list[str]] | None:
        lines = note.read_text().splitlines() if note.exists() else []
        return [line.split() for line in lines] if len(lines) >= times else None

    return await_result(look, f"start {times} of an engine")


def await_phase(launcher: Launcher, text: str) -> None:
    launcher.await_progress(lambda progress: progress.phase == text, text)


def test_an_engine_starts_beside_the_ranks_and_ends_with_the_launcher(gang: Make, engine: Path) -> None:
    job = gang(engine=engine)
    launcher = job.start("finish")
    assert launcher.exit_code() == 0, launcher.log.read_text()
    ((pid, worker, *said),) = started(engine, 1)
    assert said == ["rollout", "0", "-m", "moejob_rollout"]
    assert engine.with_name("asked").read_text().split() == [pid]
    await_ends([int(pid), int(worker)])


def test_an_engine_outlives_ranks_that_are_restarted_in_place(gang: Make, engine: Path) -> None:
    job = gang(engine=engine)
    launcher = job.start("finish_when_restarted")
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    job.rank_pids(restart=1)
    assert launcher.exit_code() == 0
    assert len(started(engine, 1)) == 1


def test_an_engine_that_dies_is_started_again_without_its_old_workers(gang: Make, engine: Path) -> None:
    job = gang(engine=engine)
    job.start("work")
    ranks = job.rank_pids()
    ((pid, worker, *_),) = started(engine, 1)
    os.kill(int(pid), signal.SIGKILL)
    again = started(engine, 2)[1]
    await_ends([int(pid), int(worker)])
    assert is_alive(int(again[0]))
    assert all(is_alive(rank) for rank in ranks)


def test_a_first_step_says_which_engine_ends_again_and_again_until_it_is_done(gang: Make, engine: Path) -> None:
    job = gang(engine=engine)
    launcher = job.start("step_when_allowed")
    await_phase(launcher, RunPhase.FIRST_STEP)
    for count, words in ((1, "once"), (2, "2 times")):
        os.kill(int(started(engine, count)[-1][0]), signal.SIGKILL)
        await_phase(launcher, f"waiting for engines: engine 0 has ended {words}")
    (job.run_folder / "go").touch()
    await_phase(launcher, RunPhase.STEPPING)


def test_a_pod_without_the_rollout_environment_says_which_image_has_it(gang: Make, tmp_path: Path) -> None:
    launcher = gang(engine=tmp_path / "nowhere").start("finish")
    assert launcher.exit_code() == 78
    assert "nowhere is no program; give resources.image" in launcher.read_last_word().message


@pytest.mark.parametrize(
    ("sections", "visible", "expected"),
    [
        pytest.param({"resources": {"accelerator": "CPU"}}, None, [("4", None)], id="one on cores"),
        pytest.param({}, None, [("8", "0"), ("9", "1"), ("10", "2"), ("11", "3")], id="one a GPU"),
        pytest.param({"grpo": {"rollout": {"tensor": 2}}}, None, [("4", "0,1"), ("5", "2,3")], id="two GPUs each"),
        pytest.param({"grpo": {"rollout": {"tensor": 2}}}, "7,5,3,1", [("4", "7,5"), ("5", "3,1")], id="named GPUs"),
        pytest.param({"grpo": {"rollout": {"placement": "Separate"}}}, None, [], id="none beside pods of engines"),
    ],
)
def test_engines_follow_from_the_job(
    sections: dict[str, Any], visible: str | None, expected: Sequence[tuple[str, str | None]]
) -> None:
    index = 2 if "resources" not in sections else 4
    given = Gang(Path("/run"), nodes=5, ranks=4, engine=Path(sys.executable)).pod_environment(index, attempt=1)
    text = spec_text(spec(method="GRPO", **sections))
    pod = read_environment(TrainerPod, given | {Environment.SPEC: text, Environment.PROGRESS_PORT: "9400"})
    environ = {"PYTHONPATH": "trainer", "HOME": "/", "RANK": "8", "WORLD_SIZE": "20"} | (
        {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    )
    commands = engine_commands(pod, environ)
    seen = [
        (command.environment[Environment.INDEX], command.environment.get("CUDA_VISIBLE_DEVICES"))
        for command in commands
    ]
    assert seen == list(expected)
    strange = {"PYTHONPATH", "RANK", "WORLD_SIZE"}
    assert all(strange.isdisjoint(command.environment) for command in commands), "an engine is no rank"


def test_an_engine_that_cannot_start_ends_the_job_with_its_last_line(gang: Make, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/bash\necho 'model.source names no model that vLLM knows: Mamba' >&2\nexit 78\n")
    engine.chmod(0o755)
    job = gang(engine=engine, logs=True)
    (job.run_folder / "logs").mkdir(parents=True)
    launcher = job.start("work")
    assert launcher.exit_code() == 78, launcher.log.read_text()
    assert (
        launcher.read_last_word().message == "engine 0 cannot start: model.source names no model that vLLM knows: Mamba"
    )
