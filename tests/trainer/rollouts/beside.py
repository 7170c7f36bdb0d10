"""Runs of GRPO beside one real engine that gets its weights by broadcast, and a way between them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders import merge_sections, spec
from engines import SECRET, Engine
from moejob_api.contract.pods import Environment, PodRole
from moejob_api.job import Spec
from moejob_api.models import catalog
from moejob_trainer.data import tiny
from ports import free_port
from trainer.rollouts.passage import SCORES, Passage
from trainer.runs import TINY, Runs, StartedRanks

STEPS = 4
GRPO: dict[str, Any] = {
    "method": "GRPO",
    "data": {"train": [{"source": "moejob/tiny-sums", "format": "Prompts"}]},
    "training": {
        "maxSteps": STEPS,
        "globalBatchSize": 16,
        # A large epsilon: Adam divides gradients near zero by their own size, and would show rounding.
        "optimizer": {"learningRate": 2e-3, "epsilon": 1e-3},
    },
    "grpo": {
        "groupSize": 4,
        "promptsPerStep": 4,
        "maxNewTokens": 8,
        "rollout": {"placement": "Separate", "sync": "Gloo"},
    },
}


class Beside:
    """Runs beside an engine; a way between them on which tests decide what happens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.engine = self._started(None).await_ready()
        self.passage = Passage(self.engine.url)
        volume = folder / "volume"
        volume.mkdir()
        self.runs = Runs(volume)
        self._launched: list[Launched] = []

    def _started(self, port: int | None) -> Engine:
        job: dict[str, Any] = {
            "model": {"dtype": "float32"},
            "data": {"maxLength": 64},
            "grpo": {"maxNewTokens": 64, "rollout": {"placement": "Separate", "sync": "Gloo"}},
        }
        return Engine(self._folder, self._folder / "engine.log", port, **job)

    def read_log(self) -> str:
        """The last lines of its log."""
        return "\n".join((self._folder / "engine.log").read_text().splitlines()[-100:])

    def replace_engine(self) -> None:
        """Kill the engine, and start another in its place."""
        self.engine.kill()
        self.engine = self._started(self.engine.port)

    def start(self, job: str, attempt: int = 1, **sections: Any) -> StartedRanks:
        """Start a run whose answers are rewarded by the service of the passage."""
        values = merge_sections(merge_sections(GRPO, self._rewards()), sections)
        return self.runs.start(job, attempt=attempt, environ=self._environ(), **values)

    def run_to_end(self, job: str, attempt: int = 1, **sections: Any) -> StartedRanks:
        """Run to the good end."""
        run = self.start(job, attempt, **sections)
        codes = run.await_exit_codes()
        assert not any(codes), f"{codes}:\n{run.read_log()}"
        return run

    def launch(self, job: str, **sections: Any) -> Launched:
        """Start such a run by a launcher, as a pod does."""
        volume = self.runs.volume
        values = merge_sections(merge_sections(TINY, merge_sections(GRPO, self._rewards())), sections)
        with (log := self._folder / f"{job}.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "moejob_trainer.launcher", "--last-word", self._folder / f"{job}.json"],
                env=os.environ | pod_environment(job, volume / job, spec(**values)) | self._environ(),
                stdout=output,
                stderr=output,
            )
        self._launched.append(Launched(volume / job, log, process))
        return self._launched[-1]

    def _environ(self) -> dict[str, str]:
        return {
            Environment.ROLLOUT_URLS: self.passage.url,
            Environment.SECRET: SECRET,
            Environment.HOST: "127.0.0.1",
        }

    def _rewards(self) -> dict[str, Any]:
        return {"grpo": {"rewards": [{"url": self.passage.url + SCORES, "timeoutSeconds": 60}]}}

    def close(self) -> None:
        self.runs.close()
        for launched in self._launched:
            launched.end()
        self.passage.close()
        self.engine.kill()


@dataclass(frozen=True)
class Launched:
    """A run of two ranks under a launcher of its own, which starts them again where they are."""

    folder: Path
    log: Path
    process: subprocess.Popen[bytes]

    def ranks(self) -> tuple[int, int]:
        """Return the processes of both ranks as they were started last."""
        started = re.findall(r"ranks started ranks=\[0, 1\] pids=\[(\d+), (\d+)\]", self.read_log())
        return int(started[-1][0]), int(started[-1][1])

    def is_running(self) -> bool:
        return self.process.poll() is None

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        """Let it end its ranks, if it still runs."""
        self.process.terminate()
        self.process.wait()


def pod_environment(job: str, folder: Path, described: Spec) -> dict[str, str]:
    """The contract's variables of the only pod of a job, whose addresses are others' to say."""
    folder.mkdir(parents=True)
    return {
        Environment.JOB: job,
        Environment.NAMESPACE: "default",
        Environment.UID: f"uid-{job}",
        Environment.SPEC: described.model_dump_json(by_alias=True, exclude_none=True),
        Environment.ROLE: PodRole.TRAINER.value,
        Environment.ATTEMPT: "1",
        Environment.INDEX: "0",
        Environment.NODES: "1",
        Environment.RANKS_PER_NODE: str(described.resources.gpus_per_node),
        Environment.RENDEZVOUS_HOST: "127.0.0.1",
        Environment.RENDEZVOUS_PORT: str(free_port()),
        Environment.PROGRESS_PORT: str(free_port()),
        Environment.RUN_FOLDER: str(folder),
        Environment.GRACE_SECONDS: "60",
    }


def lay_out(folder: Path) -> None:
    folder.mkdir(parents=True)
    config = dict(catalog.find_config(tiny.TOKENIZER) or {})
    (folder / "config.json").write_text(json.dumps(config))
