"""The checkpoints of a run as the loop knows them: state of model and optimizer, data cursor, and counters.

Joins the writer of the state (moejob_trainer.megatron.state) and the decisions about folders
(moejob_trainer.checkpoints).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter

from moejob_api.contract.pods import RunPhase
from moejob_api.job.storage import ResumeMode
from moejob_api.layout.sizes import Layout
from moejob_trainer.checkpoints import CheckpointStore, GoodCheckpoint, PendingWrite, SaveRequest
from moejob_trainer.checkpoints.adapter_compatibility import AdapterFacts, refuse_other_adapters
from moejob_trainer.checkpoints.array_file import read_arrays, size_bytes, write_arrays
from moejob_trainer.checkpoints.manifest import EvaluationFacts
from moejob_trainer.distributed import messages
from moejob_trainer.distributed.coordination import run_on_all_ranks
from moejob_trainer.distributed.encoding import NOTHING
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.evaluation.ranking import EvaluationScore
from moejob_trainer.objectives import Objective, ObjectiveState
from moejob_trainer.runtime.disk import Disk
from moejob_trainer.runtime.heartbeats import Heartbeat, ShareReport, ignore_share, working_heartbeat

T = TypeVar("T")
log = logging.getLogger(__name__)

_COUNTERS = "run-state.json"
# The arrays of the objective, where it has any.
_ARRAYS = "objective-state.safetensors"
_PACKAGES = ("torch", "megatron-core", "transformers")


class ModelState(Protocol):
    """Writer and reader of the tensors of this rank."""

    def prepare(self) -> None:
        """Begin to take the memory that saves need, once the tensors to write are known."""

    def start_writing(self, folder: Path) -> PendingWrite:
        """Begin to write the tensors of this rank."""

    def read(self, folder: Path, *, weights_only: bool, report_share: ShareReport = ignore_share) -> None:
        """Set this rank's state from a checkpoint of any layout."""

    def leave_published(self) -> None:
        """From now on neither writes nor reads frozen weights that the published model has."""

    def counters(self) -> Mapping[str, int]:
        """The numbers of updates."""

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Resume the counters."""


@dataclass(frozen=True, slots=True)
class GlooCoordinator:
    """All ranks, behind the interface that the checkpoint store expects."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """The size of the group."""
        return self.group.size()

    def gather(self, value: T, kind: TypeAdapter[T]) -> Sequence[T]:
        """Every rank's value, at rank 0."""
        return messages.gather_values(value, kind, self.group) or []

    def broadcast(self, value: T | None, kind: TypeAdapter[T]) -> T:
        """Rank 0's value, over the group."""
        return messages.broadcast_value(value, kind, self.group)


class Evaluations(Protocol):
    """The order of the evaluations so far: a part of the state, on every rank alike."""

    @property
    def measure(self) -> str:
        """The number by which evaluations are compared."""

    def kept_score(self, step: int) -> EvaluationScore | None:
        """Return the score of the evaluation after a step; None where its checkpoint is not among the best."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the order as plain JSON, to resume from."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from an order that was saved."""


@dataclass(slots=True)
class RunWriter:
    """Writes the tensors, and on rank 0 the counters and the state of the objective beside them."""

    state: ModelState
    objective: Objective
    evaluations: Evaluations
    adapter_facts: AdapterFacts
    is_first: bool
    step: int = 0
    # Arrays of the objective: gigabytes with the experts of many tokens.
    background: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "arrays"))
    _snapshot: ObjectiveState | None = None

    def take_snapshot(self, step: int) -> int:
        """Take the objective's state for the save after a step; return the bytes of its arrays."""
        self.step = step
        self._snapshot = self.objective.snapshot_state() if self.is_first else None
        return 0 if self._snapshot is None else size_bytes(self._snapshot.arrays)

    def continue_from(self, resumed_facts: AdapterFacts) -> None:
        """Save frozen weights only where the resumed state holds them; otherwise the published model has them."""
        self.adapter_facts = self.adapter_facts.model_copy(update={"holds_weights": resumed_facts.holds_weights})
        if not resumed_facts.holds_weights:
            self.state.leave_published()

    def start_writing(self, folder: Path) -> PendingWrite:
        """Begin to write the tensors of this rank; on rank 0 also the objective's arrays, and the counters at once."""
        pending = self.state.start_writing(folder)
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return pending
        entry = {
            "step": self.step,
            "objective": snapshot.entries,
            "evaluations": self.evaluations.state_dict(),
            "counters": self.state.counters(),
            "adapted": self.adapter_facts.model_dump(mode="json", by_alias=True),
        }
        Disk().write(folder / _COUNTERS, json.dumps(entry).encode() + b"\n")
        if not snapshot.arrays:
            return _PendingOfFirstRank(pending, None)
        return _PendingOfFirstRank(pending, self.background.submit(write_arrays, folder / _ARRAYS, snapshot.arrays))


@dataclass(frozen=True, slots=True)
class _PendingOfFirstRank:
    tensors: PendingWrite
    # None: the objective has none.
    arrays: Future[None] | None

    @property
    def waited_seconds(self) -> float:
        """The seconds that training has waited for the tensors."""
        return self.tensors.waited_seconds

    def is_finished(self) -> bool:
        """Return whether tensors and arrays are written; the counters already are."""
        # Always asked, for every rank asks for its tensors equally often.
        has_tensors = self.tensors.is_finished()
        if self.arrays is None or not self.arrays.done():
            return has_tensors and self.arrays is None
        self.arrays.result()
        return has_tensors

    def names(self) -> Sequence[str]:
        """The files that rank 0 wrote."""
        return [*self.tensors.names(), _COUNTERS, *([] if self.arrays is None else [_ARRAYS])]


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Facts of the state that are known before it is written."""

    layout: Layout
    format: str
    expected_bytes: int
    export_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoints:
    """Checkpoints of one run. A save may take longer than a step while it moves bytes.

    The caller's function runs when there is nothing to resume from.
    """

    store: CheckpointStore
    writer: RunWriter
    state: StateFacts
    heartbeat: Heartbeat
    on_fresh_start: Callable[[], None] | None = None

    def restore(self) -> int:
        """Resume from the newest good checkpoint of this run or another, or begin with the weights of another one's.

        Returns the steps that are done.
        """
        self.heartbeat.enter_phase(RunPhase.RESTORING)
        completed_steps = self._restore()
        self.writer.state.prepare()
        self.heartbeat.enter_phase(RunPhase.FIRST_STEP)
        return completed_steps

    def _restore(self) -> int:
        checkpoint = self.store.start()
        if checkpoint is None:
            self.store.require_room(self.state.expected_bytes, self.state.export_bytes)
            if self.on_fresh_start is not None:
                self.heartbeat.enter_phase(RunPhase.CHECKING)
                self.on_fresh_start()
            return 0
        self._refuse_other_format(checkpoint)
        is_own = checkpoint.manifest.facts.job_uid == self.store.run_folder.run.uid
        entry = _read_counters(checkpoint.path)
        stored_facts = _parse_adapter_facts(entry)
        continues_run = is_own or self.store.policy.resume is ResumeMode.RUN
        if not is_own:
            refuse_other_adapters(stored_facts, self.writer.adapter_facts, checkpoint.path, continues_run=continues_run)
        self.writer.continue_from(stored_facts)
        report_share = self.heartbeat.report_share
        self.writer.state.read(checkpoint.path, weights_only=not continues_run, report_share=report_share)
        if not continues_run:
            return 0
        # Another job's best checkpoints lie in its own folder. A state of an older version has no order.
        if is_own and "evaluations" in entry:
            self.writer.evaluations.load_state_dict(entry["evaluations"])
        self._load_objective(checkpoint, entry["objective"])
        self.writer.state.set_counters(entry["counters"])
        return int(entry["step"])

    def _load_objective(self, checkpoint: GoodCheckpoint, entries: Mapping[str, Any]) -> None:
        has_arrays = self.writer.is_first and any(file.name == _ARRAYS for file in checkpoint.manifest.files)

        def load_state() -> None:
            arrays = read_arrays(checkpoint.path / _ARRAYS) if has_arrays else {}
            self.writer.objective.load_state(ObjectiveState(entries, arrays))

        # Only rank 0 knows the data; where it refuses them, the others must not wait for it.
        run_on_all_ranks(self.store.ranks, load_state, NOTHING)

    def poll(self) -> None:
        """Let the store move a save on, and commit it."""
        self.store.poll()

    def is_due(self, step: int) -> bool:
        """Return whether the store needs a save after this step."""
        return self.store.needs_save(step)

    def save(self, step: int) -> None:
        """Save the run after this step; in the background if the job says so."""
        with working_heartbeat(self.heartbeat, step):
            array_bytes = self.writer.take_snapshot(step)
            self.store.save(self._save_request(step), self.state.expected_bytes, array_bytes)

    def _save_request(self, step: int) -> SaveRequest:
        evaluations = self.writer.evaluations
        score = evaluations.kept_score(step)
        return SaveRequest(
            step=step,
            state_format=self.state.format,
            layout={name: int(size) for name, size in asdict(self.state.layout).items()},
            versions={package: version(package) for package in _PACKAGES},
            data={"steps": step},
            evaluation=None if score is None else EvaluationFacts(measure=evaluations.measure, value=score.value),
        )

    def finish(self) -> None:
        """Wait for the save that is under way: it would end with the process."""
        self.heartbeat.enter_phase(RunPhase.FINISHING)
        self.store.wait()

    def load_best_weights(self) -> None:
        """Load the weights of the best checkpoint, if the job keeps best ones; keep the last weights if none is good.

        Training is over: the optimizer and the data cursor stay as they are.
        """
        self.heartbeat.enter_phase(RunPhase.EXPORTING)
        search = self.store.find_best()
        for refusal in search.refusals:
            log.warning("best checkpoint refused", extra={"checkpoint": refusal.folder.name, "reason": refusal.reason})
        if search.checkpoint is not None and search.checkpoint.folder.step != self.store.last_step:
            log.info("the weights are those of the best checkpoint", extra={"step": search.checkpoint.folder.step})
            self.writer.state.read(search.checkpoint.path, weights_only=True)

    def _refuse_other_format(self, checkpoint: GoodCheckpoint) -> None:
        stored_format = checkpoint.manifest.facts.state_format
        if stored_format != self.state.format:
            raise BadConfiguration(
                f"{checkpoint.path} holds {stored_format} and this job reads {self.state.format}; start from its "
                "Hugging Face export by spec.model.source instead of checkpoint.resumeFrom"
            )


def read_adapter_facts(checkpoint: Path) -> AdapterFacts:
    """Return the facts about adapters in the folder of a checkpoint."""
    return _parse_adapter_facts(_read_counters(checkpoint))


def _read_counters(checkpoint: Path) -> Any:
    return json.loads((checkpoint / _COUNTERS).read_text(encoding="utf-8"))


def _parse_adapter_facts(counters: Mapping[str, Any]) -> AdapterFacts:
    return AdapterFacts.model_validate_json(json.dumps(counters["adapted"]))


def background_writer() -> ThreadPoolExecutor:
    """Return one thread that writes files while training continues."""
    return ThreadPoolExecutor(1, "state")
