"""Real launchers for tests, as children of this process: forked, so that eleven of them import torch once."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

from builders import merge_sections, spec
from moejob_api.contract.pods import Environment, PodProgress, TerminationMessage
from moejob_trainer.launcher.launch import launch_pod
from moejob_trainer.launcher.options import Options
from moejob_trainer.launcher.stop import StopRequest
from ports import free_port

TESTS = Path(__file__).parents[2]
LONGEST_SECONDS = 300.0

Found = TypeVar("Found")


def await_result(look: Callable[[], Found | None], what: str = "it", seconds: float = LONGEST_SECONDS) -> Found:
    """Return the first result of `look` that is one."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        result = look()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and is not reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@dataclass
class Launcher:
    """One launcher and all that can be seen of it."""

    index: int
    process: ForkProcess
    port: int
    host: str
    log: Path
    last_word: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def exit_code(self, seconds: float = LONGEST_SECONDS) -> int:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"launcher {self.index} still runs:\n{self.log.read_text()}"
        return self.process.exitcode

    def read_last_word(self) -> TerminationMessage:
        return TerminationMessage.model_validate_json(self.last_word.read_bytes())

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def read_progress(self) -> PodProgress | None:
        status, body = self.get("/progress")
        return PodProgress.model_validate_json(body) if status == 200 else None

    def await_progress(self, is_expected: Callable[[PodProgress], object], what: str = "readiness") -> PodProgress:
        """The pod's progress as soon as it is as wanted."""

        def find_progress() -> PodProgress | None:
            progress = self.read_progress()
            return progress if progress is not None and is_expected(progress) else None

        return await_result(find_progress, f"{what} of pod {self.index}")

    def is_ready(self) -> bool:
        return self.get("/ready")[0] == 200

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, and wait until its ports are free: a replacement on the same address needs them."""
        self.signal(signal.SIGKILL)
        self.process.join()


# Of programs of ranks that import what the others need not.
MODULES = {
    **dict.fromkeys(
        (
            "gather_ranks",
            "gather_ranks_twice",
            "meet",
            "hang_before_the_first_step",
            "load_for_longer_than_the_deadline",
        ),
        "gloo_program",
    ),
    "begin": "incomplete_program",
    "train_and_hold": "held_rank",
}


@dataclass
class Gang:
    """Launchers of one job on simulated nodes: 127.0.0.1, 127.0.0.2 and so on."""

    folder: Path
    nodes: int = 1
    spares: int = 0
    ranks: int = 2
    attempt: int = 1
    grace: int = 60
    progress_deadline: int = 600
    lost_seconds: float = 30.0
    preload: tuple[str, ...] = ()
    # Where the fork server and ranks look first for modules.
    python_path: tuple[Path, ...] = (TESTS,)
    idle_import_seconds: float = 300.0
    logs: bool = False
    # Sections of the job that ranks of moejob_trainer.rank run.
    job: Mapping[str, Any] = field(default_factory=dict)
    # What is started in place of the Python of the rollout environment.
    engine: Path | None = None
    secret: str = "known to launchers alone"
    rendezvous: int = field(default_factory=free_port)
    progress_port: int = field(default_factory=free_port)
    master_port: int = field(default_factory=free_port)
    launchers: list[Launcher] = field(default_factory=list)

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def start(self, program: str, index: int = 0, attempt: int | None = None, port: int | None = None) -> Launcher:
        self.run_folder.mkdir(exist_ok=True)
        number, host = len(self.launchers), f"127.0.0.{index + 1}"
        log, word = self.folder / f"log-{number}", self.folder / f"word-{number}"
        log.touch()
        module = MODULES.get(program, "rank_programs")
        options = Options(
            target=f"trainer.launcher.{module}:{program}",
            preload=self.preload,
            idle_import_seconds=self.idle_import_seconds,
            last_word=word,
            logs=self.run_folder / "logs" if self.logs else None,
            lost_seconds=self.lost_seconds,
        )
        environment = self.pod_environment(index, self.attempt if attempt is None else attempt)
        environment[Environment.PROGRESS_PORT] = str(port or self.progress_port)
        environment["PYTHONPATH"] = os.pathsep.join(map(str, self.python_path))
        process = multiprocessing.get_context("fork").Process(target=_run_launcher, args=(environment, options, log))
        process.start()
        launcher = Launcher(index, process, port or self.progress_port, host, log, word)
        self.launchers.append(launcher)
        return launcher

    def start_all(self, program: str) -> list[Launcher]:
        return [self.start(program, index) for index in range(self.nodes)]

    def pod_environment(self, index: int, attempt: int) -> dict[str, str]:
        sections = {"lifecycle": {"progressDeadlineSeconds": self.progress_deadline}, **self._with_engines()}
        described = spec(**merge_sections(self.job, sections))
        engine: dict[str, str] = {} if self.engine is None else {Environment.ROLLOUT_PYTHON: str(self.engine)}
        return engine | {
            Environment.JOB: "job",
            Environment.NAMESPACE: "default",
            Environment.UID: "1234",
            Environment.SPEC: described.model_dump_json(by_alias=True, exclude_none=True),
            Environment.ROLE: "trainer",
            Environment.ATTEMPT: str(attempt),
            Environment.INDEX: str(index),
            Environment.NODES: str(self.nodes),
            Environment.SPARE_HOSTS: ",".join(f"127.0.0.{self.nodes + number + 1}" for number in range(self.spares)),
            Environment.RANKS_PER_NODE: str(self.ranks),
            Environment.RENDEZVOUS_HOST: "127.0.0.1",
            Environment.HOST: f"127.0.0.{index + 1}",
            Environment.RUN_FOLDER: str(self.run_folder),
            Environment.GRACE_SECONDS: str(self.grace),
            Environment.RENDEZVOUS_PORT: str(self.rendezvous),
            Environment.SECRET: self.secret,
            "MASTER_PORT": str(self.master_port),
        }

    def _with_engines(self) -> dict[str, Any]:
        if self.engine is None:
            return {}
        return {"method": "GRPO", "training": {"globalBatchSize": None}, "resources": {"accelerator": "CPU"}}

    def await_start_notes(self, restart: int = 0) -> dict[int, dict[str, Any]]:
        """Return how every rank was started, once all of them were."""
        paths = [self.run_folder / f"start-{restart}-{rank}.json" for rank in range(self.nodes * self.ranks)]
        try:
            await_result(lambda: all(path.exists() for path in paths), f"start {restart} of all ranks")
        except AssertionError as error:
            logs = "\n".join(
                f"launcher of pod {launcher.index}:\n{launcher.log.read_text()}" for launcher in self.launchers
            )
            raise AssertionError(f"{error}\n{logs}") from None
        return {rank: json.loads(path.read_text()) for rank, path in enumerate(paths)}

    def rank_pids(self, restart: int = 0) -> list[int]:
        return [note["pid"] for note in self.await_start_notes(restart).values()]

    def allow(self, name: str) -> None:
        (self.run_folder / name).touch()

    def close(self) -> None:
        for launcher in self.launchers:
            if launcher.process.is_alive():
                launcher.kill()


def await_ends(pids: list[int]) -> None:
    """Wait until none of these processes lives."""
    await_result(lambda: not any(is_alive(pid) for pid in pids), f"the end of {pids}")


def _run_launcher(environment: Mapping[str, str], options: Options, log: Path) -> None:
    # Other tests of this process may have a fork server of their own; it is no child of this one.
    vars(forkserver._forkserver).update(vars(forkserver.ForkServer()))  # noqa: SLF001
    # Not the main module of pytest: ranks would import it.
    sys.modules["__main__"] = types.ModuleType("__main__")
    log_file = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    # A test that waits in vain for this process shows where it stands.
    faulthandler.dump_traceback_later(LONGEST_SECONDS - 20, file=log_file)
    os.environ.update(environment)
    stop = StopRequest()
    stop.listen_for_signals()
    sys.exit(launch_pod(environment, options, stop))
