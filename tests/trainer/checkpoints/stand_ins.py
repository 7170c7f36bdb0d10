"""Owns what the tests of checkpoints share: a volume that loses power, a writer, ranks as threads, small builders."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from moejob_api.job.storage import Checkpoint
from moejob_trainer.checkpoints import (
    CheckpointStore,
    FenceToken,
    RunFolder,
    RunOwner,
    SavedCheckpoint,
    SaveRequest,
    SingleRank,
    StepFolder,
)
from moejob_trainer.checkpoints.manifest import CheckpointFacts
from moejob_trainer.checkpoints.names import parse_step_folder
from moejob_trainer.distributed.encoding import decode_message, encode_message
from moejob_trainer.runtime.disk import Disk

T = TypeVar("T")


class ProcessCrash(BaseException):
    """The process is gone. Nothing may catch it."""


@dataclass
class FragileDisk(Disk):
    """A volume in a world that ends at the chosen operation; if power goes, what was not synced may go with it.

    Syncing costs nothing here: what it would have saved is known.
    """

    # So that the same crash always finds the same things done.
    reads_at_once = 1

    crash_at: int | None = None
    power: random.Random | None = None
    operations: int = 0
    is_dead: bool = False
    unsynced_files: set[Path] = field(default_factory=set)
    # By folder: how to take back each change of its names that was not synced, the last change last.
    unsynced_names: dict[Path, list[Callable[[], object]]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def make_folder(self, path: Path, mode: int = 0o755) -> None:
        with self.lock:
            self._count_operation()
            is_new = not path.exists()
            super().make_folder(path, mode)
            if is_new:
                self._record_undo(path, lambda: shutil.rmtree(path))

    def write(self, path: Path, content: bytes) -> None:
        with self.lock:
            self._count_operation(lambda: path.write_bytes(content[: len(content) // 2]))
            super().write(path, content)
            self.unsynced_files.add(path)

    def sync(self, path: Path) -> None:
        with self.lock:
            self._count_operation()
            path.stat()
            self.unsynced_files.discard(path)
            self.unsynced_names.pop(path, None)

    def rename(self, source: Path, target: Path) -> None:
        with self.lock:
            self._count_operation()
            before = target.read_bytes() if target.exists() else None
            super().rename(source, target)
            if source in self.unsynced_files:
                self.unsynced_files = self.unsynced_files - {source} | {target}
            self._record_undo(target, lambda: _undo_rename(source, target, before))

    def link(self, source: Path, target: Path) -> None:
        with self.lock:
            self._count_operation()
            super().link(source, target)
            self._record_undo(target, target.unlink)

    def remove(self, path: Path) -> None:
        with self.lock:
            self._count_operation()
            if path.is_symlink():
                super().remove(path)
            elif path.exists():
                content = path.read_bytes()
                super().remove(path)
                self._record_undo(path, lambda: path.write_bytes(content))

    def remove_folder(self, path: Path) -> None:
        with self.lock:
            self._count_operation()
            super().remove_folder(path)
            self.unsynced_names.pop(path, None)

    def _record_undo(self, path: Path, undo: Callable[[], object]) -> None:
        self.unsynced_names.setdefault(path.parent, []).append(undo)

    def _count_operation(self, torn: Callable[[], object] = lambda: None) -> None:
        if self.is_dead:
            raise ProcessCrash
        self.operations += 1
        if self.crash_at is not None and self.operations >= self.crash_at:
            self.is_dead = True
            torn()
            self._lose_power()
            raise ProcessCrash

    def _lose_power(self) -> None:
        if self.power is None:
            return
        for path in sorted(self.unsynced_files):
            if path.exists() and self.power.random() < 0.5:
                path.write_bytes(path.read_bytes()[: self.power.randrange(2)])
        for folder, undos in self.unsynced_names.items():
            # Names of one folder are lost from the last change backwards, as in a journal.
            for undo in reversed(undos[self.power.randrange(len(undos) + 1) :]):
                if folder.exists():
                    undo()


def _undo_rename(source: Path, target: Path, before: bytes | None) -> None:
    target.rename(source)
    if before is not None:
        target.write_bytes(before)


class InlineExecutor(Executor):
    """Does at once what it is given, so that a test decides what happens when."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 the result raises it, as in any executor
            future.set_exception(error)
        return future


def make_state_files(folder: StepFolder, rank: int = 0) -> dict[str, bytes]:
    """Return the files of a rank of the tests at a step: nothing in one is like anything in another."""
    text = f"{folder.name} of rank {rank}; ".encode()
    files = {f"__{rank}_0.distcp": text * 5, f"__{rank}_1.distcp": text * 3}
    return files | ({".metadata": text, "common/state.pt": text * 2} if rank == 0 else {})


@dataclass
class StandInWriting:
    """A part of a save that is finished after a given number of questions."""

    files: Sequence[str]
    questions: int = 0
    waited_seconds: float = 0.0

    def is_finished(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def names(self) -> Sequence[str]:
        # Rank 0 does not name the files that stand for all ranks: the commit has to find them.
        return [name for name in self.files if name.endswith(".distcp")]


@dataclass
class StateWriter:
    """Writes the state of the tests."""

    disk: Disk
    rank: int = 0
    questions: int = 0

    def start_writing(self, folder: Path) -> StandInWriting:
        named = parse_step_folder(folder.name)
        assert named is not None
        files = make_state_files(named, self.rank)
        for name, content in files.items():
            if "/" in name:
                self.disk.make_folder((folder / name).parent)
            self.disk.write(folder / name, content)
        return StandInWriting(list(files), self.questions)


class ThreadCoordinators:
    """Values that threads standing for ranks exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = [b""] * size
        # A rank that never comes shall fail the test, not hang it.
        self.barrier = threading.Barrier(size, timeout=300)

    def run_on_ranks(self, act: Callable[[ThreadCoordinator], T]) -> list[T | Exception]:
        """Return the result on each rank."""

        def run_rank(rank: int) -> T | Exception:
            try:
                return act(ThreadCoordinator(self, rank))
            except Exception as error:  # noqa: BLE001 the test compares what every rank raised
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run_rank, range(self.size)))


@dataclass(frozen=True)
class ThreadCoordinator:
    """One of them."""

    group: ThreadCoordinators
    rank: int

    @property
    def size(self) -> int:
        return self.group.size

    def gather(self, value: T, kind: TypeAdapter[T]) -> Sequence[T]:
        everyones = self._exchange(encode_message(value, kind))
        return [decode_message(content, kind) for content in everyones] if self.rank == 0 else []

    def broadcast(self, value: T | None, kind: TypeAdapter[T]) -> T:
        return decode_message(self._exchange(encode_message(value, kind))[0], kind)

    def _exchange(self, content: bytes) -> list[bytes]:
        self.group.sent[self.rank] = content
        self.group.barrier.wait()
        everyones = list(self.group.sent)
        self.group.barrier.wait()
        return everyones


def make_facts(step: int = 10, attempt: int = 0, restart: int = 0) -> CheckpointFacts:
    return CheckpointFacts(
        step=step,
        attempt=attempt,
        restart=restart,
        job_uid="uid-1",
        state_format="torch_dist/fully_reshardable",
        layout={"tensor": 2},
        versions={"torch": "2.13.0"},
        data={"samples": step * 8},
    )


def make_save_request(step: int) -> SaveRequest:
    return SaveRequest(step, "torch_dist/fully_reshardable", {"tensor": 2}, {"torch": "2.13.0"}, {"samples": step * 8})


def make_policy(keep: int = 2, asynchronous: bool = False, resume_from: str | None = None) -> Checkpoint:
    return Checkpoint(keep=keep, asynchronous=asynchronous, resume_from=resume_from)


def make_run_folder(
    folder: Path, attempt: int = 0, restart: int = 0, is_ours: Callable[[], bool] = lambda: True, uid: str = "uid-1"
) -> RunFolder:
    return RunFolder(folder, RunOwner(job="sft", uid=uid), FenceToken(attempt, restart), is_ours)


def open_store(
    where: RunFolder, how: Checkpoint | None = None, disk: Disk | None = None, writer: StateWriter | None = None
) -> CheckpointStore:
    volume = disk or FragileDisk()
    return CheckpointStore(
        where, how or make_policy(), SingleRank(), writer or StateWriter(volume), volume, background=InlineExecutor()
    )


def save_steps(folder: Path, *steps: int, attempt: int = 0, keep: int = 100) -> list[Path]:
    """A run that saved these steps, and where."""
    run = open_store(make_run_folder(folder, attempt), make_policy(keep))
    run.start()
    outcomes = [run.save(make_save_request(step)) for step in steps]
    return [
        run.run_folder.checkpoints / outcome.folder.name for outcome in outcomes if isinstance(outcome, SavedCheckpoint)
    ]


def flip_bit(path: Path, at: int = 0) -> None:
    """Change one bit of one byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
