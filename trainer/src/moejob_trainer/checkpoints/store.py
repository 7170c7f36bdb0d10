"""The checkpoints of one run: found at the start, saved while it trains, kept and cleaned.

Puts the decisions of this package in order and performs them. Every rank has one store and makes the same calls; rank 0
decides and commits. Knows neither Megatron nor torch: the state is the writer's, the collectives are the ranks'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from moejob_api.contract.pods import RunFile
from moejob_api.job.storage import Checkpoint
from moejob_trainer.checkpoints.best import best_good
from moejob_trainer.checkpoints.cleaning import Retention, clean, set_aside
from moejob_trainer.checkpoints.commit import commit
from moejob_trainer.checkpoints.manifest import EvaluationFacts, Facts, FileEntry, entries, manifest, written_names
from moejob_trainer.checkpoints.names import StepFolder
from moejob_trainer.checkpoints.policy import LastSave, is_interval_over, room_complaint, start_complaint
from moejob_trainer.checkpoints.run import RunFolder, other_run, own_run_folder, resumed
from moejob_trainer.checkpoints.unread import retry_unread
from moejob_trainer.checkpoints.verification import Found, Search, VerificationDepth, latest
from moejob_trainer.checkpoints.writer import Pending, StateWriter
from moejob_trainer.distributed.coordination import Coordinator, all_agree, on_all_ranks, on_first_rank
from moejob_trainer.distributed.encoding import BOOLEAN, INTEGER, NOTHING
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.runtime.disk import Disk, explained, remove_tree

_POLL_SECONDS = 0.02
_ENTRIES = TypeAdapter(list[FileEntry])


@dataclass(frozen=True, slots=True)
class Moment:
    """The run at the moment of a save. Facts describes each field."""

    step: int
    state_format: str
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    data: Mapping[str, int]
    evaluation: EvaluationFacts | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint that was committed, and what it cost."""

    folder: StepFolder
    size_bytes: int
    # From the request to the commit.
    seconds: float
    # The time that training stood still for it.
    stalled_seconds: float


@dataclass(slots=True)
class _Saving:
    """A save that is under way."""

    facts: Facts
    path: Path
    pending: Pending
    called_seconds: float
    stalled_seconds: float
    hashing: Future[list[FileEntry]] | None = None


def _worker() -> Executor:
    return ThreadPoolExecutor(1, "checkpoints")


@dataclass(slots=True)
class CheckpointStore:
    """One rank's access to the run's checkpoints. At most one save is under way at any time."""

    place: RunFolder
    policy: Checkpoint
    ranks: Coordinator
    writer: StateWriter
    disk: Disk = field(default_factory=Disk)
    clock: Callable[[], float] = time.monotonic
    # Hashes and deletes one after the other, while training continues.
    background: Executor = field(default_factory=_worker)
    # The number of an evaluation by which checkpoints are the best.
    measure: str = ""
    # The last save that was committed, by a poll or by a wait.
    last: Saved | None = None
    _start: LastSave = field(default_factory=lambda: LastSave(0, 0.0))
    _newest: StepFolder | None = None
    _saving: _Saving | None = None
    _size_bytes: int | None = None
    _cleaning: Future[None] | None = None
    _passed_over: frozenset[StepFolder] = frozenset()

    @property
    def last_step(self) -> int | None:
        """The step of the newest complete checkpoint of this run."""
        return None if self._newest is None else self._newest.step

    def start(self) -> Found | None:
        """Take the folder, clean it, and find the checkpoint to resume from; None if the run starts from its model."""
        on_first_rank(self.ranks, self._open, NOTHING)
        search = latest(self.place.checkpoints, VerificationDepth.HASHES, self.ranks)
        on_first_rank(self.ranks, lambda: set_aside(self.place, search, self.disk), NOTHING)
        self._passed_over = frozenset(refusal.folder for refusal in search.refused if refusal.is_unread)
        self._begin_from(search.found)
        if search.found is not None or self.policy.resume_from is None:
            return search.found
        return resumed(self.policy.resume_from, other_run(self.policy.resume_from, self.place.folder), self.ranks)

    def require_room(self, checkpoint_bytes: int, export_bytes: int) -> None:
        """Refuse a run that could not save once, before its first step. Every rank calls this."""
        on_first_rank(self.ranks, lambda: self._refuse_little_room(checkpoint_bytes, export_bytes), NOTHING)

    def needs_save(self, step: int) -> bool:
        """Return whether to save the state after this step. Every rank asks; the clock of rank 0 decides."""
        if self.policy.every_steps is not None:
            return is_interval_over(step, 0.0, self.policy, self._start)

        def by_this_clock() -> bool:
            return is_interval_over(step, self.clock(), self.policy, self._start)

        return on_first_rank(self.ranks, by_this_clock, BOOLEAN)

    def save(self, moment: Moment, expected_bytes: int | None = None) -> Saved | None:
        """Save: in the background if the job says so, otherwise wait until the save is committed or has failed.

        A save that is still under way is finished first. `expected_bytes` is used until a save has been measured.
        """
        called = self.clock()
        self.wait()
        if self._newest is not None and moment.step <= self._newest.step:
            return None
        facts = self._facts(moment)
        path = self.place.checkpoints / facts.folder.name
        needed_bytes = self._size_bytes or expected_bytes or 0
        on_first_rank(self.ranks, lambda: self._make_room(path, needed_bytes), NOTHING)
        pending = self._begun(path)
        self._start = LastSave(moment.step, called)
        self._saving = _Saving(facts, path, pending, called, stalled_seconds=self.clock() - called)
        return None if self.policy.asynchronous else self.wait()

    def poll(self) -> Saved | None:
        """Move a background save on without waiting, and commit it once it is written. Every rank calls this."""
        saving, called = self._take_saving(), self.clock()
        if saving is None:
            return None
        hashing = self._finished_hashing(saving)
        if hashing is not None:
            return self._commit(saving, hashing, called)
        saving.stalled_seconds += self.clock() - called
        self._saving = saving
        return None

    def wait(self) -> Saved | None:
        """Finish the save that is under way, if any: before another one, and before the process ends."""
        saving, called = self._take_saving(), self.clock()
        if saving is None:
            return None
        while (hashing := self._finished_hashing(saving)) is None:
            time.sleep(_POLL_SECONDS)
        return self._commit(saving, hashing, called)

    def best(self) -> Search:
        """Find the good checkpoint with the best evaluation, if the job keeps best ones. Every rank calls this."""
        if self.policy.keep_best is None:
            return Search(None)
        search = best_good(self.place.checkpoints, self.measure, self.ranks)
        if any(refusal.is_unread for refusal in search.refused):
            on_first_rank(self.ranks, lambda: retry_unread(self.place, search, self.disk), NOTHING)
        return search

    # --- at the start ---

    def _open(self) -> None:
        with explained("opening the run folder", self.place.folder):
            self.place.require_ours("opens the run")
            own_run_folder(self.place.folder, self.place.run, self.disk)
            # The pods of other jobs that resume from here share the volume's group.
            self.disk.make_folder(self.place.checkpoints, mode=0o750)
            self.disk.sync(self.place.folder)

    def _refuse_little_room(self, checkpoint_bytes: int, export_bytes: int) -> None:
        with explained("looking for room", self.place.folder):
            free_bytes = self.disk.free_bytes(self.place.checkpoints)
        if complaint := start_complaint(free_bytes, checkpoint_bytes, export_bytes, self.place.folder):
            raise BadConfiguration(complaint)

    def _begin_from(self, found: Found | None) -> None:
        self._start = LastSave(0 if found is None else found.folder.step, self.clock())
        if found is not None:
            self._newest, self._size_bytes = found.folder, found.manifest.size_bytes
        self._clean_up()

    # --- saving ---

    def _facts(self, moment: Moment) -> Facts:
        token, uid = self.place.token, self.place.run.uid
        return Facts(attempt=token.attempt, restart=token.restart, job_uid=uid, **asdict(moment))

    def _make_room(self, path: Path, needed_bytes: int) -> None:
        with explained("making room for a checkpoint", path):
            self.place.require_ours("saves")
            if self._cleaning is not None:
                self._cleaning.result()
            remove_tree(self.disk, path)
            free_bytes = self.disk.free_bytes(path.parent)
            if complaint := room_complaint(free_bytes, needed_bytes, self.policy.keep, self.place.folder):
                raise BadConfiguration(complaint)
            self.disk.make_folder(path)

    def _begun(self, path: Path) -> Pending:
        begun: list[Pending] = []

        def begin() -> None:
            with self._explained("saving", path):
                begun.append(self.writer.begin(path))

        on_all_ranks(self.ranks, begin, NOTHING)
        return begun[0]

    @contextmanager
    def _explained(self, doing: str, path: Path) -> Iterator[None]:
        try:
            with explained(doing, path):
                yield
        except (BadConfiguration, TransientFailure):
            # A newer attempt removes this one's files: that is the cause, whatever the volume reports.
            self.place.require_ours("saves")
            raise

    def _take_saving(self) -> _Saving | None:
        """Take out the save that is under way: one that fails from here on is not tried again."""
        saving, self._saving = self._saving, None
        return saving

    def _finished_hashing(self, saving: _Saving) -> Future[list[FileEntry]] | None:
        """Return the hashes of this rank's files once every rank has its own; until then start the next part of it."""
        if saving.hashing is None:
            if not self._is_written(saving):
                return None
            saving.hashing = self.background.submit(self._own_entries, saving)
        return saving.hashing if all_agree(self.ranks, saving.hashing.done()) else None

    def _is_written(self, saving: _Saving) -> bool:
        def finished() -> bool:
            with self._explained("saving", saving.path):
                return saving.pending.finished()

        everyones = on_all_ranks(self.ranks, finished, BOOLEAN)
        return self.ranks.broadcast(all(everyones), BOOLEAN)

    def _own_entries(self, saving: _Saving) -> list[FileEntry]:
        with explained("reading back what was saved", saving.path):
            return entries(saving.path, saving.pending.names(), self.disk)

    def _commit(self, saving: _Saving, hashing: Future[list[FileEntry]], called: float) -> Saved:
        # First: if a newer attempt has removed these files, the ranks must say so instead of failing to read them.
        on_first_rank(self.ranks, lambda: self.place.require_ours(f"commits {saving.path.name}"), NOTHING)
        parts = on_all_ranks(self.ranks, hashing.result, _ENTRIES)

        def commit_all() -> int:
            named = [entry for part in parts for entry in part]
            with explained("committing a checkpoint", saving.path):
                self._sync_step_log()
                others = set(written_names(saving.path)) - {entry.name for entry in named}
                complete = manifest([*named, *entries(saving.path, others, self.disk)], saving.facts)
                commit(saving.path, complete, self.place.is_ours, self.disk)
            return complete.size_bytes

        size_bytes = on_first_rank(self.ranks, commit_all, INTEGER)
        saving.stalled_seconds += self.clock() - called
        return self._note(saving, size_bytes)

    def _note(self, saving: _Saving, size_bytes: int) -> Saved:
        folder, seconds = saving.facts.folder, self.clock() - saving.called_seconds
        self._newest, self._size_bytes = folder, size_bytes
        self.last = Saved(folder, size_bytes, seconds, saving.stalled_seconds + saving.pending.waited_seconds)
        self._clean_up()
        return self.last

    def _sync_step_log(self) -> None:
        """Sync the log of steps: a durable checkpoint must not outlive the lines of its steps."""
        path = self.place.folder / RunFile.STEPS
        if path.exists():
            self.disk.sync(path)
            self.disk.sync(path.parent)

    def _clean_up(self) -> None:
        if self.ranks.rank == 0:
            self._cleaning = self.background.submit(
                clean, self.place, Retention(self.policy, self.measure, self._passed_over), self.disk
            )
