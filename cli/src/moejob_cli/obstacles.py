"""The obstacles of jobs, found in the objects that kubectl prints: what holds each job up, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from moejob_api.api_bodies import Raw
from moejob_api.contract.texts import escaped_text
from moejob_api.diagnosis.diagnose import diagnose_job
from moejob_api.diagnosis.reading import find_jobs, list_objects, read_evidence
from moejob_api.documents.syntax import UnreadableError
from moejob_api.documents.tree import parse_documents
from moejob_api.job import KIND
from moejob_api.job.status import Diagnosis, Phase
from moejob_api.problems import InvalidSpec, Problem, Rule

STANDARD_INPUT = "-"
_HOW = "kubectl get moetrainingjobs,pods,pvc,events -o json"


@dataclass(frozen=True, slots=True)
class JobObstacle:
    """A job and what is in its way; None: nothing is."""

    name: str
    namespace: str
    phase: Phase | None
    diagnosis: Diagnosis | None


def is_file_name(text: str) -> bool:
    """Return whether a text names a file, or standard input: no name of a job has a point or a slash."""
    return text == STANDARD_INPUT or "." in text or "/" in text or Path(text).is_file()


def read_objects(files: Sequence[str]) -> tuple[Raw, ...]:
    """Read all objects of files; `-` is standard input."""
    return tuple(body for file in files for tree in _read_documents(file) for body in list_objects(tree))


def _read_documents(file: str) -> Iterable[object]:
    name = "standard input" if file == STANDARD_INPUT else file
    try:
        text = sys.stdin.read() if file == STANDARD_INPUT else Path(file).read_text(encoding="utf-8")
        return parse_documents(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec((Problem(Rule.UNREADABLE, "", f"{name}: {error}"),)) from None
    except UnreadableError as error:
        raise InvalidSpec((Problem(Rule.UNREADABLE, "", f"{name}: {error.reason}"),)) from None


def find_obstacles(objects: Sequence[Raw], now: datetime) -> tuple[JobObstacle, ...]:
    """Return the obstacle of each job among the objects; it is an error when there is none."""
    jobs = find_jobs(objects)
    if not jobs:
        raise InvalidSpec(
            (Problem(Rule.UNREADABLE, "", f"there is no {KIND} in the input; give it what `{_HOW}` prints"),)
        )
    return tuple(_job_obstacle(job, objects, now) for job in jobs)


def _job_obstacle(job: Raw, objects: Sequence[Raw], now: datetime) -> JobObstacle:
    evidence = read_evidence(job, objects)
    about = evidence.job
    return JobObstacle(about.name, about.namespace, about.status.phase, diagnose_job(evidence, now))


def obstacle_lines(obstacle: JobObstacle) -> Iterator[str]:
    """Yield the lines about one job, for a person."""
    phase = "new" if obstacle.phase is None else obstacle.phase
    head = f"{escaped_text(obstacle.namespace)}/{escaped_text(obstacle.name)}: {phase}"
    if obstacle.diagnosis is None:
        yield f"{head}, nothing is in its way"
        return
    yield f"{head}, {obstacle.diagnosis.blocker} since {obstacle.diagnosis.since}"
    for label, text in (
        ("what", obstacle.diagnosis.message),
        ("next", obstacle.diagnosis.next),
        ("fix", obstacle.diagnosis.fix),
    ):
        yield f"  {label:<5} {escaped_text(text)}"


def obstacle_document(obstacle: JobObstacle) -> dict[str, Any]:
    """Return what is known of one job as plain JSON values."""
    return {
        "name": obstacle.name,
        "namespace": obstacle.namespace,
        "phase": obstacle.phase,
        "why": None if obstacle.diagnosis is None else obstacle.diagnosis.model_dump(mode="json", by_alias=True),
    }
