"""The run folder as `moejob run` uses it: its owner, the number of the next attempt, and the lock of one run."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from moejob_api.contract.pods import RunFile, RunOwner, parse_token_name
from moejob_cli.running.machine import CannotRun

_LOCK = "run.lock"
_SECRET_BYTES = 32
_SECRET = re.compile(rf"[0-9a-f]{{{2 * _SECRET_BYTES}}}\n")
# No run has this many attempts: a file with a larger number was not made by a run.
_MOST_ATTEMPTS = 10**9


class HeldRunFolder:
    """A run folder that this process holds; made by `hold_run_folder`."""

    def __init__(self, path: Path, owner: RunOwner, secret: str, lock: int) -> None:
        self.path, self.owner, self.secret, self.lock = path, owner, secret, lock
        self._attempt = 0

    @property
    def logs(self) -> Path:
        """Return the folder of the logs of launchers and ranks."""
        return self.path / RunFile.LOGS

    def next_attempt(self) -> int:
        """Return a number greater than that of any attempt with a claim in this folder."""
        self._attempt = max(self._attempt, _newest_attempt(self.path)) + 1
        return self._attempt


@contextmanager
def hold_run_folder(path: Path, job: str) -> Iterator[HeldRunFolder]:
    """Make or reuse the run folder of a job, and hold it. CannotRun when it is another job's, or in use."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_foreign_folder(path)
        lock = _lock_folder(path)
    except OSError as error:
        raise CannotRun(
            f"{path} cannot be used as a run folder: {error.strerror}; name another one with --run-dir"
        ) from None
    try:
        _make_private_folder(path / RunFile.LOGS)
        yield HeldRunFolder(path, _read_owner(path, job), _read_secret(path), lock)
    finally:
        os.close(lock)


def _refuse_foreign_folder(path: Path) -> None:
    is_run = (path / RunFile.OWNER).exists() or (path / _LOCK).exists()
    if not is_run and any(path.iterdir()):
        raise CannotRun(f"{path} holds something that is no run of moejob; name an empty or new folder with --run-dir")


def _lock_folder(path: Path) -> int:
    """Lock the folder. Launchers inherit the lock, so the folder is free when the last of them has ended."""
    lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise CannotRun(
            f"{path} is in use by another moejob run, or by its ranks that still save; wait until it has ended, or "
            "give this one a folder of its own with --run-dir"
        ) from None
    return lock


def _make_private_folder(folder: Path) -> None:
    """Make the folder private to its user, even one that exists already: logs may hold a job's secrets."""
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        # A link could lead to a folder that others are meant to read.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CannotRun(
            f"{folder} cannot be kept from other users: {error.strerror}; delete it, or name another folder with "
            "--run-dir"
        ) from None


def _read_owner(path: Path, job: str) -> RunOwner:
    file = path / RunFile.OWNER
    if not file.exists():
        owner = RunOwner(job=job, uid=str(uuid.uuid4()))
        _write_durably(file, owner.model_dump_json(by_alias=True) + "\n")
        return owner
    try:
        stored_owner = RunOwner.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise CannotRun(f"{file} cannot be read ({error.errors()[0]['msg']}); name another folder") from None
    if stored_owner.job != job:
        raise CannotRun(
            f"{path} is the run folder of job {stored_owner.job}, not of {job}; name another one with --run-dir"
        )
    return stored_owner


def _read_secret(path: Path) -> str:
    """Return the secret of the run, made once: it opens the rendezvous, and proves claims of earlier starts."""
    file = path / RunFile.SECRET
    if not file.exists():
        _write_durably(file, f"{secrets.token_hex(_SECRET_BYTES)}\n", mode=0o600)
    secret_line = _read_private_file(file)
    if _SECRET.fullmatch(secret_line) is None:
        raise CannotRun(f"{file} does not hold the secret of a run; delete it, and the next start makes another")
    return secret_line.strip()


def _read_private_file(file: Path) -> str:
    """Make a file private to its user and return its content: a copy of the folder may have lost the file's mode."""
    try:
        # A link could lead to a file that others know.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8", errors="replace") as stream:
            os.fchmod(stream.fileno(), 0o600)
            return stream.read()
    except OSError as error:
        raise CannotRun(
            f"{file} cannot be used as the secret of a run: {error.strerror}; delete it, and the next start makes one"
        ) from None


def _newest_attempt(path: Path) -> int:
    try:
        names = [file.name for file in (path / RunFile.CLAIMS).iterdir()]
    except FileNotFoundError:
        return 0
    attempts = (numbers[0] for numbers in map(parse_token_name, names) if numbers)
    return max((attempt for attempt in attempts if attempt < _MOST_ATTEMPTS), default=0)


def _write_durably(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file completely or not at all, even if the power fails: without its owner file no run could continue."""
    new_file = file.with_name(f".{file.name}.new")
    with os.fdopen(os.open(new_file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, mode), "w", encoding="utf-8") as target:
        target.write(text)
        target.flush()
        os.fsync(target.fileno())
    new_file.replace(file)
    for folder in (file.parent, file.parent.parent):
        _sync_names(folder)


def _sync_names(folder: Path) -> None:
    # The folder above a run's may be another user's, and not for this one to open.
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
