"""The Python stacks of ranks, as a program in a pod prints them: a rank a line. No models: a reader starts at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from moejob_api import api_bodies

# The program of the trainer that prints them for its pod.
STACKS_MODULE = "moejob_trainer.launcher.stack_report"


@dataclass(frozen=True, slots=True)
class RankStacks:
    """The stacks of all threads of one rank, in lines of faulthandler; `problem`: why there are none."""

    rank: int
    pid: int
    lines: tuple[str, ...]
    problem: str = ""


def stacks_line(stacks: RankStacks) -> str:
    """Return the line of one rank."""
    return json.dumps(stacks_document(stacks))


def stacks_document(stacks: RankStacks) -> dict[str, Any]:
    """Return the stacks of one rank as plain values."""
    return {"rank": stacks.rank, "pid": stacks.pid, "lines": [*stacks.lines], "problem": stacks.problem}


def parse_stacks_line(line: bytes | str) -> RankStacks | None:
    """Read the line of one rank; None when it is none."""
    try:
        body = api_bodies.as_mapping(json.loads(line))
    except ValueError:
        return None
    rank, pid = api_bodies.as_integer(body.get("rank")), api_bodies.as_integer(body.get("pid"))
    if rank is None or pid is None:
        return None
    lines = body.get("lines")
    texts = map(api_bodies.as_text, lines if isinstance(lines, list) else ())
    return RankStacks(rank, pid, tuple(texts), api_bodies.as_text(body.get("problem")))
