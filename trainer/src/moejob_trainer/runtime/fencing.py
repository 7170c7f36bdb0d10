"""The fence token of a run folder: every attempt writes its number first, and only the newest may commit.

A node that is cut off is not gone: its ranks may wake up and write. A token is a file whose name is the number;
nothing is ever rewritten, so no two processes can lose each other's claim. The launcher of pod 0 claims before any rank
starts; a rank that commits a checkpoint asks `is_ours(folder, FenceToken.of_rank())` just before the marker is written.
Knows nothing of what is committed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moejob_api.contract import Environment, RunFile, claim_name, claimed
from moejob_trainer.errors import Superseded

TOKENS = RunFile.CLAIMS.value
RESTART = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True, order=True)
class FenceToken:
    """One start of all ranks; a later one is greater."""

    attempt: int
    restart: int

    def __str__(self) -> str:
        return f"attempt {self.attempt}, restart {self.restart}"

    @classmethod
    def of_rank(cls, environ: Mapping[str, str] = os.environ) -> FenceToken:
        """The claim under which the launcher has started this rank."""
        return cls(int(environ[Environment.ATTEMPT]), int(environ[RESTART]))


def acquire_token(folder: Path, attempt: int, restart: int) -> FenceToken:
    """Take the run folder for this start of the ranks, or raise Superseded when it is taken by it or a newer one."""
    mine = FenceToken(attempt, restart)
    path = _path(folder, mine)
    folder.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        raise Superseded(
            f"{folder} is already used by {mine}; two runs cannot share a folder: give this one its own"
        ) from None
    seen = _tokens(folder)
    if seen[-1] != mine:
        path.unlink(missing_ok=True)
        raise Superseded(f"{folder} belongs to {seen[-1]} now; {mine} is too late and writes nothing")
    for older in seen[:-1]:
        _path(folder, older).unlink(missing_ok=True)
    return mine


def is_ours(folder: Path, mine: FenceToken) -> bool:
    """Return whether that token is still the newest one."""
    # A network file system may answer from memory until the folder is changed from here.
    touched = folder / TOKENS / f"probe-{mine.attempt}.{mine.restart}-{os.getpid()}"
    with suppress(FileNotFoundError):
        touched.touch()
        touched.unlink()
    return newest_token(folder) == mine


def newest_token(folder: Path) -> FenceToken | None:
    """The claim that holds a run folder; None when there is none."""
    return max(_tokens(folder), default=None)


def _tokens(folder: Path) -> list[FenceToken]:
    try:
        names = [path.name for path in (folder / TOKENS).iterdir()]
    except FileNotFoundError:
        return []
    found = (claimed(name) for name in names)
    return sorted(FenceToken(*numbers) for numbers in found if numbers)


def _path(folder: Path, of: FenceToken) -> Path:
    return folder / TOKENS / claim_name(of.attempt, of.restart)
