"""The jobs of a workflow, run in order on this machine as GitHub runs them, without a container.

Scripts run by bash with the variables, outputs and expressions of their steps. Steps of others are named and skipped.
Programs that act on the world outside are stand-ins that write down how they were called.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

_EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


class UnknownExpressionError(Exception):
    """An expression that GitHub would read as empty, or that this emulation does not know."""


@dataclass
class EmulatedJob:
    """One run of a job: for each step its name and how it ended. None is a step of others."""

    name: str
    steps: list[tuple[str, int | None]] = field(default_factory=list)
    output: str = ""

    @property
    def failed(self) -> bool:
        return any(code for _, code in self.steps)


@dataclass
class Emulation:
    """A workflow in a checkout, with stand-ins in front of $PATH."""

    workflow: Path
    checkout: Path
    stand_ins: Path
    context: Mapping[str, str]

    def run(self) -> list[EmulatedJob]:
        """Run every job whose needs have succeeded; one of a matrix counts once for each of its values."""
        raw = yaml.safe_load(self.workflow.read_text())
        finished: dict[str, list[EmulatedJob]] = {}
        for name, job in raw["jobs"].items():
            needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
            if all(finished.get(need) and not any(run.failed for run in finished[need]) for need in needs):
                finished[name] = [self._run_job(name, job, raw.get("env", {}), values) for values in _matrix(job)]
        return [run for runs in finished.values() for run in runs]

    def calls(self) -> list[str]:
        """Every call of a stand-in, in order."""
        log = self.stand_ins / "log"
        return log.read_text().splitlines() if log.exists() else []

    def _run_job(self, name: str, job: Any, variables: Mapping[str, str], matrix: Mapping[str, str]) -> EmulatedJob:
        run = EmulatedJob(" ".join([name, *matrix.values()]))
        known = {**self.context, **{f"matrix.{key}": value for key, value in matrix.items()}}
        environment = self._filled({**variables, **job.get("env", {})}, known)
        for step in job["steps"]:
            known |= {f"env.{key}": value for key, value in environment.items()}
            if (step.get("if") == "failure()") is not run.failed:
                continue
            if "uses" in step:
                self._filled(step.get("with", {}), known)
                run.steps.append((step["uses"].partition("@")[0], None))
                continue
            code, outputs, text = self._run_script(step, environment | self._filled(step.get("env", {}), known), known)
            run.steps.append((step.get("name", step["run"]), code))
            run.output += text
            known |= {f"steps.{step.get('id')}.outputs.{key}": value for key, value in outputs.items()}
        return run

    def _run_script(
        self, step: Any, environment: Mapping[str, str], known: Mapping[str, str]
    ) -> tuple[int, dict[str, str], str]:
        outputs = self.stand_ins / "outputs"
        outputs.write_text("")
        ended = subprocess.run(
            ["/bin/bash", "--noprofile", "--norc", "-e", "-c", _filled_text(step["run"], known)],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.checkout,
            env={
                "PATH": f"{self.stand_ins}:/usr/local/bin:/usr/bin:/bin",
                "HOME": str(self.stand_ins),
                "LOG": str(self.stand_ins / "log"),
                "GITHUB_OUTPUT": str(outputs),
                **environment,
            },
        )
        return ended.returncode, dict(_pairs(outputs.read_text())), ended.stdout

    def _filled(self, texts: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, str]:
        return {name: _filled_text(str(text), known) for name, text in texts.items()}


def write_stand_ins(folder: Path, programs: Mapping[str, str]) -> Path:
    """Write programs that log their calls and then do what is given; return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, script in programs.items():
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$LOG"\n{script}\n')
        (folder / name).chmod(0o755)
    return folder


def _matrix(job: Any) -> Iterator[dict[str, str]]:
    axes = job.get("strategy", {}).get("matrix", {})
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _filled_text(text: str, known: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise UnknownExpressionError(match[0])
        return known[match[1]]

    return _EXPRESSION.sub(value, text)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, value = line.partition("=")
        yield name, value
