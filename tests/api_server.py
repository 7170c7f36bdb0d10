"""Owns the API server's own verdict on our CRD and on jobs, without a cluster: the program in tools/crdcheck."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any, Self

ROOT = Path(__file__).parent.parent
CRD = ROOT / "crds/moetrainingjobs.yaml"
RULES = ROOT / "crds/rules.yaml"
SOURCE = ROOT / "tests/cluster/tools/crdcheck"

Body = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The API server's answer to one object: `stored` is what reads back, `errors` read "field: message".

    What the policy of the rules refuses reads "policy: message".
    """

    stored: Body
    unknown: tuple[str, ...]
    errors: tuple[str, ...]
    cells: tuple[Any, ...]


class ApiServer:
    """One process that answers for as long as it is open."""

    def __init__(self, program: Path, definition: Path = CRD, rules: Path = RULES) -> None:
        self._process = subprocess.Popen([program, definition, rules], stdin=PIPE, stdout=PIPE, text=True, bufsize=1)
        self.refusals_of_definition = self._read().errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=300)

    def create_objects(self, *objects: Body) -> list[Answer]:
        """The answers to creating each object."""
        return [self._ask({"verb": "create", "object": each}) for each in objects]

    def replace_objects(self, *pairs: tuple[Body, Body], verb: str = "update") -> list[Answer]:
        """The answers to replacing each first object by its second; verb updateStatus writes the status."""
        return [self._ask({"verb": verb, "old": old, "object": new}) for old, new in pairs]

    def _ask(self, request: Body) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        return self._read()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        return _parse_answer(json.loads(self._process.stdout.readline()))


def find_or_build_server() -> Path:
    """The program, built from its sources where it is not yet: 3 minutes on two cores the first time."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(SOURCE.iterdir()))).hexdigest()[:16]
    folder = Path(os.environ.get("MOEJOB_CACHE") or _user_cache() / "moejob")
    program = folder / "tools" / f"crdcheck-{digest}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        half = program.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [shutil.which("go") or "go", "build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-o", half, "."],
            cwd=SOURCE,
            env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"},
            check=True,
        )
        # Renamed when whole: another test run may be looking.
        half.rename(program)
    return program


def job_body(spec: Body, name: str = "job", **metadata: Any) -> Body:
    """A job as it is sent; the namespace and version are what the API server would put in by itself."""
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": name, "namespace": "default", "resourceVersion": "1", **metadata},
        "spec": spec,
    }


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _parse_answer(reply: Body) -> Answer:
    return Answer(
        stored=reply.get("object", {}),
        unknown=tuple(reply["unknown"]),
        errors=tuple(f"{error['field']}: {error['message']}" for error in reply["errors"]),
        cells=tuple(reply.get("cells") or ()),
    )
