"""Whose the run folder is: every attempt writes its number there first, and whoever is not the newest commits nothing.

A node that is cut off is not gone: its ranks may wake up and go on writing. A claim is a file whose name is the number;
nothing is ever rewritten, so no two processes can lose each other's claim. The launcher of pod 0 claims before any rank
starts; who commits a checkpoint asks `is_ours(folder, Claim.of_rank())` just before the marker is written.
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

CLAIMS = RunFile.CLAIMS.value
RESTART = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """One start of all ranks; a later one is greater."""

    attempt: int
    restart: int

    def __str__(self) -> str:
        return f"attempt {self.attempt}, restart {self.restart}"

    @classmethod
    def of_rank(cls, environ: Mapping[str, str] = os.environ) -> Claim:
        """The claim under which the launcher has started this rank."""
        return cls(int(environ[Environment.ATTEMPT]), int(environ[RESTART]))


def claim(folder: Path, attempt: int, restart: int) -> Claim:
    """Take the run folder for this start of the ranks, or raise Superseded when it is taken by it or a newer one."""
    mine = Claim(attempt, restart)
    path = _path(folder, mine)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        raise Superseded(
            f"{folder} is already used by {mine}; two runs cannot share a folder: give this one its own"
        ) from None
    seen = _claims(folder)
    if seen[-1] != mine:
        path.unlink(missing_ok=True)
        raise Superseded(f"{folder} belongs to {seen[-1]} now; {mine} is too late and writes nothing")
    for older in seen[:-1]:
        _path(folder, older).unlink(missing_ok=True)
    return mine


def is_ours(folder: Path, mine: Claim) -> bool:
    """Whether that claim is still the newest one."""
    # A network file system may answer from memory until the folder is changed from here.
    probe = folder / CLAIMS / f"probe-{mine.attempt}.{mine.restart}-{os.getpid()}"
    with suppress(FileNotFoundError):
        probe.touch()
        probe.unlink()
    return newest(folder) == mine


def newest(folder: Path) -> Claim | None:
    """The claim that holds a run folder; None when there is none."""
    return max(_claims(folder), default=None)


def _claims(folder: Path) -> list[Claim]:
    try:
        names = [path.name for path in (folder / CLAIMS).iterdir()]
    except FileNotFoundError:
        return []
    found = (claimed(name) for name in names)
    return sorted(Claim(*numbers) for numbers in found if numbers)


def _path(folder: Path, of: Claim) -> Path:
    return folder / CLAIMS / claim_name(of.attempt, of.restart)
