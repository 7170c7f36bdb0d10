"""The Python stacks of ranks that run: written by a signal's handler, which works where Python does not.

The default of a signal is to kill, so a rank has the handler from its birth: it inherits that of the fork server. An
exec takes handlers away and keeps the mask, so the signal is blocked around it and comes later. A reader asks the
kernel for the handler first, and signals a process that it holds by a descriptor: a number may be used again.

Stacks go to a file in memory, which is named for its rank and found among the rank's open files. Nothing has to be
cleaned up, and no name on a disk can be taken by others.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from moejob_api.contract.stacks import RankStacks

STACKS = signal.SIGUSR2

_FILE = "moejob-stacks"
_LINK = re.compile(rf"/memfd:{_FILE}-([0-9]+)-([0-9]+)(?: \(deleted\))?")
_POLL_SECONDS = 0.01
# faulthandler writes 100 threads of 100 calls at most.
_MOST_BYTES = 4 * 1024 * 1024
_PENDING, _BLOCKED, _CAUGHT = ("SigPnd", "ShdPnd"), ("SigBlk",), ("SigBlk", "SigCgt", "SigIgn")


def inherit_handler() -> None:
    """Give the handler to this process and to all that it forks; stacks go to standard error."""
    faulthandler.register(STACKS, all_threads=True)


def open_stacks(rank: int) -> None:
    """Have this rank write its stacks to a file of its own, and let a signal come that was held back."""
    try:
        file = os.memfd_create(f"{_FILE}-{rank}-{os.getpid()}")
        # Readers empty the file: the next stacks begin at its end, wherever the last ones ended.
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(STACKS, file=file, all_threads=True)
    except OSError:
        inherit_handler()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACKS})


def hold_back_signal() -> None:
    """Block the signal in this process, before an exec takes its handler away."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS})


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that is a rank, and the descriptor of its file of stacks in that process."""

    rank: int
    pid: int
    file: int

    @classmethod
    def find_rank(cls, pid: int) -> RankProcess | None:
        """Return the rank that a process is; None for another process, as the child of a rank."""
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    link = _LINK.fullmatch(str(entry.readlink()))
                    if link is not None and int(link[2]) == pid:
                        return cls(int(link[1]), pid, int(entry.name))
        return None


def find_ranks(variable: str, run_folder: Path) -> tuple[RankProcess, ...]:
    """Return the ranks of this machine, or of this container, whose launcher has the run folder in this variable."""
    prefix, wanted = f"{variable}=".encode(), os.fsencode(os.path.realpath(run_folder))
    ranks = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            folders = [entry.removeprefix(prefix) for entry in variables if entry.startswith(prefix)]
            if any(os.path.realpath(folder) == wanted for folder in folders):
                ranks.append(RankProcess.find_rank(int(process.name)))
    return tuple(sorted(filter(None, ranks), key=lambda each: each.rank))


def read_stacks(ranks: Iterable[RankProcess], seconds: float) -> tuple[RankStacks, ...]:
    """Let ranks write their stacks, and return them; a rank that does not write in time is returned with the reason."""
    until = time.monotonic() + seconds
    with ExitStack() as opened:
        requests = [_StackRequest(rank, opened, until) for rank in ranks]
        while any(request.is_unanswered() for request in requests) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return tuple(request.read_answer() for request in requests)


class _StackRequest:
    """The request to one rank; it ends with the files that `opened` closes."""

    def __init__(self, process: RankProcess, opened: ExitStack, until: float) -> None:
        self._process = process
        self._file = -1
        # Threads of libraries that block every signal.
        self._blocking: frozenset[str] = frozenset()
        try:
            self._problem = self._send_signal(opened, until)
        except OSError as error:
            self._problem = f"it cannot be asked: {error.strerror or error}"

    def _send_signal(self, opened: ExitStack, until: float) -> str:
        pid = self._process.pid
        descriptor = os.pidfd_open(pid)
        opened.callback(os.close, descriptor)
        self._file = os.open(f"/proc/{pid}/fd/{self._process.file}", os.O_RDWR)
        opened.callback(os.close, self._file)
        if not _lock_file(self._file, until):
            return "another reader takes its stacks; try again"
        if not _has_signal(Path(f"/proc/{pid}"), _CAUGHT):
            return "it has no handler for the signal, or its kernel does not say so"
        self._blocking = frozenset(_blocking_threads(pid))
        os.ftruncate(self._file, 0)
        signal.pidfd_send_signal(descriptor, STACKS)
        return ""

    def is_unanswered(self) -> bool:
        """Return whether the handler has not run to its end: the kernel blocks the signal in its thread meanwhile."""
        if self._problem:
            return False
        process = Path(f"/proc/{self._process.pid}")
        if not process.exists():
            return False
        is_empty = os.fstat(self._file).st_size == 0
        return (
            is_empty
            or _has_signal(process, _PENDING)
            or not self._blocking.issuperset(_blocking_threads(self._process.pid))
        )

    def read_answer(self) -> RankStacks:
        """Return the stacks that the rank has written, or the reason that it has not."""
        text = b"" if self._problem else os.pread(self._file, _MOST_BYTES, 0)
        problem = self._problem if text or self._problem else _silence_reason(self._process.pid)
        lines = text.decode(errors="backslashreplace").splitlines()
        return RankStacks(self._process.rank, self._process.pid, tuple(lines), problem)


def _lock_file(file: int, until: float) -> bool:
    """Lock the file against other readers; False if that takes too long."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True


def _blocking_threads(pid: int) -> Iterable[str]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if _has_signal(thread, _BLOCKED):
                yield thread.name


def _has_signal(folder: Path, names: Iterable[str]) -> bool:
    """Return whether one of these masks of a process or a thread has the signal."""
    masks = (_status_line(folder, name) for name in names)
    return any(mask and int(mask, 16) >> (STACKS - 1) & 1 for mask in masks)


def _silence_reason(pid: int) -> str:
    state = _status_line(Path(f"/proc/{pid}"), "State")
    return f"it did not write them in time; its process is {state}" if state else "it has ended"


def _status_line(folder: Path, name: str) -> str:
    with suppress(OSError):
        for line in (folder / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""
