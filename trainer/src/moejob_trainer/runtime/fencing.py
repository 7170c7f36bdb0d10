"""The fence token of a run folder: every attempt writes its number first, and only the newest may commit.

A node that is cut off is not gone: its ranks may wake up and write. A token is a file whose name is the number and a
proof, HMAC(key, number); nothing is ever rewritten, so no two processes can lose each other's claim. The key is derived
from the job's secret, which all its attempts share: others who write to the volume see tokens and can make none, and
what they make is no token. A lost secret is made again with another value, and then two starts cannot read each
other's proofs. So a start removes every token of a lower number, again whenever it commits; a start whose own token is
gone is superseded.
The launcher of pod 0 claims before any rank starts; a rank that commits a checkpoint asks `Fence.is_ours(token)` just
before the marker is written. Knows nothing of what is committed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from moejob_api.contract.pods import Environment, RunFile, fence_token_name, parse_token_name
from moejob_trainer.errors import Superseded
from moejob_trainer.runtime.disk import Disk

TOKENS = RunFile.CLAIMS.value
RESTART = "TORCHELASTIC_RESTART_COUNT"
# A bound: a stranger who makes tokens without end must not hold up a start.
_PASSES = 100


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


def claim_key(secret: str, uid: str) -> bytes:
    """Return the key that proves claims of a job: of all its attempts, for a later one must know an earlier one's."""
    return hmac.digest(secret.encode(), f"moejob claims\0{uid}".encode(), hashlib.sha256)


@dataclass(frozen=True, slots=True)
class Fence:
    """The claims of one job on a run folder."""

    folder: Path
    key: bytes = field(repr=False)

    @classmethod
    def of_rank(cls, environ: Mapping[str, str] = os.environ) -> Fence:
        """The fence of the run that this rank belongs to."""
        secret, uid = environ.get(Environment.SECRET, ""), environ[Environment.UID]
        return cls(Path(environ[Environment.RUN_FOLDER]), claim_key(secret, uid))

    def acquire(self, attempt: int, restart: int, previous: FenceToken | None = None) -> FenceToken:
        """Take the run folder for this start of the ranks; Superseded when it is taken by it or a newer one.

        The token of this launcher's earlier start, if given, is gone when a start with another secret took over.
        """
        token = FenceToken(attempt, restart)
        if previous is not None and not self.is_ours(previous):
            raise Superseded(
                f"{self.folder} is not held by {previous} any more; {token} is too late and writes nothing"
            )
        path = self._token_path(token)
        self.folder.mkdir(parents=True, exist_ok=True)
        _keep_from_others(path.parent)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            # Without a sync, a loss of power could give one number to two starts.
            for folder in (path.parent, self.folder):
                Disk().sync(folder)
        except FileExistsError:
            raise Superseded(
                f"{self.folder} is already used by {token}; two runs cannot share a folder: give this one its own"
            ) from None
        tokens = self._read_tokens()
        if tokens[-1] != token:
            path.unlink(missing_ok=True)
            raise Superseded(f"{self.folder} belongs to {tokens[-1]} now; {token} is too late and writes nothing")
        # Check again: a start with another secret cannot read this token, and may just have removed the earlier one.
        if previous is not None and previous not in tokens:
            path.unlink(missing_ok=True)
            raise Superseded(
                f"{self.folder} was taken from {previous} just now; {token} is too late and writes nothing"
            )
        self._remove_older(token)
        return token

    def is_ours(self, token: FenceToken) -> bool:
        """Return whether that token is still the newest; if so, remove older ones, even with unreadable proofs."""
        # A network file system may answer from memory until the folder is changed from here.
        probe = self.folder / TOKENS / f"probe-{token.attempt}.{token.restart}-{os.getpid()}"
        with suppress(FileNotFoundError):
            probe.touch()
            probe.unlink()
        if self.newest_token() != token:
            return False
        self._remove_older(token)
        return True

    def newest_token(self) -> FenceToken | None:
        """The claim that holds the run folder; None when there is none."""
        return max(self._read_tokens(), default=None)

    def newest_token_of(self, attempt: int) -> FenceToken | None:
        """The claim that holds the run folder; None when none of this attempt does: no round of it has begun."""
        newest = self.newest_token()
        return newest if newest is not None and newest.attempt == attempt else None

    def foreign_names(self) -> list[str]:
        """Names like those of tokens, without this job's proof."""
        return sorted(
            name for name in self._file_names() if parse_token_name(name) and self._proven_token(name) is None
        )

    def _remove_older(self, token: FenceToken) -> None:
        """Remove all tokens of lower numbers, until there are none: one of them may be replaced by the next meanwhile.

        An earlier start has made its next token either before the last pass, which removes it, or later: then it finds
        its own token gone.
        """
        for _ in range(_PASSES):
            older = [
                name
                for name in self._file_names()
                if (number := parse_token_name(name)) and FenceToken(*number) < token
            ]
            if not older:
                return
            for name in older:
                (self.folder / TOKENS / name).unlink(missing_ok=True)

    def _read_tokens(self) -> list[FenceToken]:
        return sorted(token for token in map(self._proven_token, self._file_names()) if token is not None)

    def _file_names(self) -> list[str]:
        try:
            return [path.name for path in (self.folder / TOKENS).iterdir()]
        except FileNotFoundError:
            return []

    def _proven_token(self, name: str) -> FenceToken | None:
        numbers = parse_token_name(name)
        if numbers is None:
            return None
        token = FenceToken(*numbers)
        return token if hmac.compare_digest(name, self._file_name(token)) else None

    def _file_name(self, token: FenceToken) -> str:
        number = fence_token_name(token.attempt, token.restart)
        return f"{number}.{hmac.digest(self.key, number.encode(), hashlib.sha256).hex()}"

    def _token_path(self, token: FenceToken) -> Path:
        return self.folder / TOKENS / self._file_name(token)


def _keep_from_others(folder: Path) -> None:
    """Make a folder that its user alone can open, also of one that is there already. A link is none."""
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Another user's folder, and a volume without modes, keep their mode: proofs protect the tokens there, too.
        with suppress(OSError):
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
