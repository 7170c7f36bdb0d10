"""Sources that lie on a claim have to name it, and a path inside of it: a pod mounts nothing else of it."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job import Spec
from moejob_api.job.claims import SCHEME, unusable_sources
from moejob_api.problems import Problem, Rule


def source_problems(spec: Spec) -> Iterator[Problem]:
    """Refuse what the trainer would not find."""
    for path, source in unusable_sources(spec):
        yield Problem(Rule.CONFLICT, path, f"{source} does not name a path inside a claim; write {SCHEME}claim/path")
