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
from moejob_trainer.checkpoints.best import find_best_checkpoint
from moejob_trainer.checkpoints.cleaning import Retention, apply_retention, reject_damaged_checkpoints
from moejob_trainer.checkpoints.commit import commit_checkpoint
from moejob_trainer.checkpoints.manifest import (
    CheckpointFacts,
    EvaluationFacts,
    FileEntry,
    build_manifest,
    list_state_files,
    sync_and_hash_files,
)
from moejob_trainer.checkpoints.names import StepFolder
from moejob_trainer.checkpoints.policy import LastSave, is_interval_over, room_complaint, start_complaint
from moejob_trainer.checkpoints.run import RunFolder, acquire_run_folder, find_resume_checkpoint, resume_folder
from moejob_trainer.checkpoints.unread import retry_unread
from moejob_trainer.checkpoints.verification import (
    CheckpointSearch,
    GoodCheckpoint,
    VerificationDepth,
    find_latest_checkpoint,
)
from moejob_trainer.checkpoints.writer import PendingWrite, StateWriter
from moejob_trainer.distributed.coordination import Coordinator, is_true_everywhere, run_on_all_ranks, run_on_first_rank
from moejob_trainer.distributed.encoding import BOOLEAN, INTEGER, NOTHING
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.runtime.disk import Disk, explain_failure, remove_tree

_POLL_SECONDS = 0.02
_ENTRIES = TypeAdapter(list[FileEntry])


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The run at the moment of a save. Facts describes each field."""

    step: int
    state_format: str
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    data: Mapping[str, int]
    evaluation: EvaluationFacts | None = None


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """One checkpoint that was committed, and what it cost."""

    folder: StepFolder
    size_bytes: int
    # From the request to the commit.
    seconds: float
    # The time that training stood still for it.
    stalled_seconds: float


@dataclass(slots=True)
class _SaveInProgress:
    """A save that is under way."""

    facts: CheckpointFacts
    path: Path
    pending: PendingWrite
    called_seconds: float
    stalled_seconds: float
    varying_bytes: int
    hashing: Future[list[FileEntry]] | None = None


@dataclass(slots=True)
class CheckpointStore:
    """One rank's access to the run's checkpoints. At most one save is under way at any time."""

    run_folder: RunFolder
    policy: Checkpoint
    ranks: Coordinator
    writer: StateWriter
    disk: Disk = field(default_factory=Disk)
    clock: Callable[[], float] = time.monotonic
    # Hashes and deletes one after the other, while training continues.
    background: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoints"))
    # The number of an evaluation by which checkpoints are the best.
    measure: str = ""
    # The last save that was committed, by a poll or by a wait.
    last_saved: SavedCheckpoint | None = None
    _last_save: LastSave = field(default_factory=lambda: LastSave(0, 0.0))
    _newest_folder: StepFolder | None = None
    _current_save: _SaveInProgress | None = None
    _size_bytes: int | None = None
    _cleaning: Future[None] | None = None
    _passed_over: frozenset[StepFolder] = frozenset()

    @property
    def last_step(self) -> int | None:
        """The step of the newest complete checkpoint of this run."""
        return None if self._newest_folder is None else self._newest_folder.step

    def start(self) -> GoodCheckpoint | None:
        """Take the folder, clean it, and find the checkpoint to resume from; None if the run starts from its model."""
        run_on_first_rank(self.ranks, self._open_run_folder, NOTHING)
        search = find_latest_checkpoint(self.run_folder.checkpoints, VerificationDepth.HASHES, self.ranks)
        run_on_first_rank(self.ranks, lambda: reject_damaged_checkpoints(self.run_folder, search, self.disk), NOTHING)
        self._passed_over = frozenset(refusal.folder for refusal in search.refusals if refusal.is_unread)
        self._record_start(search.checkpoint)
        if search.checkpoint is not None or self.policy.resume_from is None:
            return search.checkpoint
        return find_resume_checkpoint(
            self.policy.resume_from, resume_folder(self.policy.resume_from, self.run_folder.folder), self.ranks
        )

    def require_room(self, checkpoint_bytes: int, export_bytes: int) -> None:
        """Refuse a run that could not save once, before its first step. Every rank calls this."""
        run_on_first_rank(self.ranks, lambda: self._refuse_little_room(checkpoint_bytes, export_bytes), NOTHING)

    def needs_save(self, step: int) -> bool:
        """Return whether to save the state after this step. Every rank asks; the clock of rank 0 decides."""
        if self.policy.every_steps is not None:
            return is_interval_over(step, 0.0, self.policy, self._last_save)

        def is_interval_over_now() -> bool:
            return is_interval_over(step, self.clock(), self.policy, self._last_save)

        return run_on_first_rank(self.ranks, is_interval_over_now, BOOLEAN)

    def save(
        self, request: SaveRequest, expected_bytes: int | None = None, varying_bytes: int = 0
    ) -> SavedCheckpoint | None:
        """Save: in the background if the job says so, otherwise wait until the save is committed or has failed.

        A save that is still under way is finished first. `expected_bytes` is used until a save has been measured.
        It counts the most of the `varying_bytes`, which are different in each save; rank 0 gives those of this one.
        """
        requested_seconds = self.clock()
        self.wait()
        if self._newest_folder is not None and request.step <= self._newest_folder.step:
            return None
        facts = self._build_facts(request)
        path = self.run_folder.checkpoints / facts.folder.name
        measured_bytes = self._size_bytes
        needed_bytes = (
            max(expected_bytes or 0, varying_bytes) if measured_bytes is None else measured_bytes + varying_bytes
        )
        run_on_first_rank(self.ranks, lambda: self._make_room(path, needed_bytes), NOTHING)
        pending = self._start_write(path)
        self._last_save = LastSave(request.step, requested_seconds)
        self._current_save = _SaveInProgress(
            facts, path, pending, requested_seconds, self.clock() - requested_seconds, varying_bytes
        )
        return None if self.policy.asynchronous else self.wait()

    def poll(self) -> SavedCheckpoint | None:
        """Move a background save on without waiting, and commit it once it is written. Every rank calls this."""
        saving, started_seconds = self._take_current_save(), self.clock()
        if saving is None:
            return None
        hashing = self._finished_hashing(saving)
        if hashing is not None:
            return self._commit_save(saving, hashing, started_seconds)
        saving.stalled_seconds += self.clock() - started_seconds
        self._current_save = saving
        return None

    def wait(self) -> SavedCheckpoint | None:
        """Finish the save that is under way, if any: before another one, and before the process ends."""
        saving, started_seconds = self._take_current_save(), self.clock()
        if saving is None:
            return None
        while (hashing := self._finished_hashing(saving)) is None:
            time.sleep(_POLL_SECONDS)
        return self._commit_save(saving, hashing, started_seconds)

    def find_best(self) -> CheckpointSearch:
        """Find the good checkpoint with the best evaluation, if the job keeps best ones. Every rank calls this."""
        if self.policy.keep_best is None:
            return CheckpointSearch(None)
        search = find_best_checkpoint(self.run_folder.checkpoints, self.measure, self.ranks)
        if any(refusal.is_unread for refusal in search.refusals):
            run_on_first_rank(self.ranks, lambda: retry_unread(self.run_folder, search, self.disk), NOTHING)
        return search

    # --- at the start ---

    def _open_run_folder(self) -> None:
        with explain_failure("opening the run folder", self.run_folder.folder):
            self.run_folder.require_ours("opens the run")
            acquire_run_folder(self.run_folder.folder, self.run_folder.run, self.disk)
            # The pods of other jobs that resume from here share the volume's group.
            self.disk.make_folder(self.run_folder.checkpoints, mode=0o750)
            self.disk.sync(self.run_folder.folder)

    def _refuse_little_room(self, checkpoint_bytes: int, export_bytes: int) -> None:
        with explain_failure("looking for room", self.run_folder.folder):
            free_bytes = self.disk.free_bytes(self.run_folder.checkpoints)
        if complaint := start_complaint(free_bytes, checkpoint_bytes, export_bytes, self.run_folder.folder):
            raise BadConfiguration(complaint)

    def _record_start(self, checkpoint: GoodCheckpoint | None) -> None:
        self._last_save = LastSave(0 if checkpoint is None else checkpoint.folder.step, self.clock())
        if checkpoint is not None:
            self._newest_folder, self._size_bytes = checkpoint.folder, checkpoint.manifest.size_bytes
        self._start_cleaning()

    # --- saving ---

    def _build_facts(self, request: SaveRequest) -> CheckpointFacts:
        token, uid = self.run_folder.token, self.run_folder.run.uid
        return CheckpointFacts(attempt=token.attempt, restart=token.restart, job_uid=uid, **asdict(request))

    def _make_room(self, path: Path, needed_bytes: int) -> None:
        with explain_failure("making room for a checkpoint", path):
            self.run_folder.require_ours("saves")
            if self._cleaning is not None:
                self._cleaning.result()
            remove_tree(self.disk, path)
            free_bytes = self.disk.free_bytes(path.parent)
            if complaint := room_complaint(free_bytes, needed_bytes, self.policy.keep, self.run_folder.folder):
                raise BadConfiguration(complaint)
            self.disk.make_folder(path)

    def _start_write(self, path: Path) -> PendingWrite:
        pending_writes: list[PendingWrite] = []

        def start_write() -> None:
            with self._explain_failures("saving", path):
                pending_writes.append(self.writer.start_writing(path))

        run_on_all_ranks(self.ranks, start_write, NOTHING)
        return pending_writes[0]

    @contextmanager
    def _explain_failures(self, doing: str, path: Path) -> Iterator[None]:
        try:
            with explain_failure(doing, path):
                yield
        except (BadConfiguration, TransientFailure):
            # A newer attempt removes this attempt's files: it is the cause of any error that the volume reports.
            self.run_folder.require_ours("saves")
            raise

    def _take_current_save(self) -> _SaveInProgress | None:
        """Take out the current save: a save that fails from here on is not repeated."""
        saving, self._current_save = self._current_save, None
        return saving

    def _finished_hashing(self, saving: _SaveInProgress) -> Future[list[FileEntry]] | None:
        """Return the hashes of this rank's files once every rank has its own; until then start the next part of it."""
        if saving.hashing is None:
            if not self._is_written(saving):
                return None
            saving.hashing = self.background.submit(self._hash_own_files, saving)
        return saving.hashing if is_true_everywhere(self.ranks, saving.hashing.done()) else None

    def _is_written(self, saving: _SaveInProgress) -> bool:
        def is_finished() -> bool:
            with self._explain_failures("saving", saving.path):
                return saving.pending.is_finished()

        are_finished = run_on_all_ranks(self.ranks, is_finished, BOOLEAN)
        return self.ranks.broadcast(all(are_finished), BOOLEAN)

    def _hash_own_files(self, saving: _SaveInProgress) -> list[FileEntry]:
        with explain_failure("reading back what was saved", saving.path):
            return sync_and_hash_files(saving.path, saving.pending.names(), self.disk)

    def _commit_save(
        self, saving: _SaveInProgress, hashing: Future[list[FileEntry]], started_seconds: float
    ) -> SavedCheckpoint:
        # First: if a newer attempt has removed these files, the ranks must say so instead of failing to read them.
        run_on_first_rank(self.ranks, lambda: self.run_folder.require_ours(f"commits {saving.path.name}"), NOTHING)
        parts = run_on_all_ranks(self.ranks, hashing.result, _ENTRIES)

        def commit_all() -> int:
            rank_entries = [entry for part in parts for entry in part]
            with explain_failure("committing a checkpoint", saving.path):
                self._sync_step_log()
                unclaimed_names = set(list_state_files(saving.path)) - {entry.name for entry in rank_entries}
                full_manifest = build_manifest(
                    [*rank_entries, *sync_and_hash_files(saving.path, unclaimed_names, self.disk)], saving.facts
                )
                commit_checkpoint(saving.path, full_manifest, self.run_folder.is_ours, self.disk)
            return full_manifest.size_bytes

        size_bytes = run_on_first_rank(self.ranks, commit_all, INTEGER)
        saving.stalled_seconds += self.clock() - started_seconds
        return self._record_save(saving, size_bytes)

    def _record_save(self, saving: _SaveInProgress, size_bytes: int) -> SavedCheckpoint:
        folder, seconds = saving.facts.folder, self.clock() - saving.called_seconds
        self._newest_folder, self._size_bytes = folder, size_bytes - saving.varying_bytes
        self.last_saved = SavedCheckpoint(
            folder, size_bytes, seconds, saving.stalled_seconds + saving.pending.waited_seconds
        )
        self._start_cleaning()
        return self.last_saved

    def _sync_step_log(self) -> None:
        """Sync the log of steps: a durable checkpoint must not outlive the lines of its steps."""
        path = self.run_folder.folder / RunFile.STEPS
        if path.exists():
            self.disk.sync(path)
            self.disk.sync(path.parent)

    def _start_cleaning(self) -> None:
        if self.ranks.rank == 0:
            self._cleaning = self.background.submit(
                apply_retention, self.run_folder, Retention(self.policy, self.measure, self._passed_over), self.disk
            )
