"""The checkpoints of a run as the loop knows them: state of model and optimizer, data cursor, and counters.

Puts together what writes the state (moejob_trainer.megatron.state) and what decides over folders
(moejob_trainer.checkpoints).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from moejob_api.job.storage import Resume
from moejob_api.layout.sizes import Layout
from moejob_trainer.checkpoints import Checkpoints, Found, Moment, Pending
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.inherited import Adapted, refuse_other_adapters
from moejob_trainer.objectives import Objective

T = TypeVar("T")

_COUNTERS = "run-state.json"
_PACKAGES = ("torch", "megatron-core", "transformers")


class State(Protocol):
    """What writes and reads the tensors of this rank."""

    def begin(self, folder: Path) -> Pending:
        """Begins to write this rank's part."""

    def read(self, folder: Path, *, weights_only: bool) -> None:
        """Sets this rank's state from what any layout wrote."""

    def leave_published(self) -> None:
        """From now on neither writes nor reads frozen weights that the published model has."""

    def counters(self) -> Mapping[str, int]:
        """How many updates were made."""

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Goes on counting there."""


@dataclass(frozen=True, slots=True)
class WorldRanks:
    """All ranks, as the checkpoint store wants to speak to them."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return self.group.size()

    def gathered(self, value: T) -> Sequence[T]:
        """Every rank's value, at rank 0."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        said: T = values[0]
        return said


@dataclass(slots=True)
class RunWriter:
    """Writes the tensors, and on rank 0 the counters beside them."""

    state: State
    objective: Objective
    adapted: Adapted
    is_first: bool
    step: int = 0

    def go_on_from(self, theirs: Adapted) -> None:
        """Holds weights beside adapters only where what the run goes on from does: else they are published."""
        self.adapted = self.adapted.model_copy(update={"holds_weights": theirs.holds_weights})
        if not theirs.holds_weights:
            self.state.leave_published()

    def begin(self, folder: Path) -> Pending:
        """Begins to write this rank's part."""
        pending = self.state.begin(folder)
        if not self.is_first:
            return pending
        told = {
            "step": self.step,
            "objective": self.objective.state_dict(),
            "counters": self.state.counters(),
            "adapted": self.adapted.model_dump(mode="json", by_alias=True),
        }
        (folder / _COUNTERS).write_text(json.dumps(told) + "\n", encoding="utf-8")
        return _WithCounters(pending)


@dataclass(frozen=True, slots=True)
class _WithCounters:
    tensors: Pending

    def finished(self) -> bool:
        """Whether the tensors are written; the counters are."""
        return self.tensors.finished()

    def names(self) -> Sequence[str]:
        """What rank 0 wrote."""
        return [*self.tensors.names(), _COUNTERS]


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What is known of the state before any of it is written."""

    layout: Layout
    format: str
    expected_bytes: int


class RunCheckpoints:
    """Restores and saves a run. `begun` is told when there is nothing to go on from."""

    def __init__(
        self, store: Checkpoints, writer: RunWriter, state: StateFacts, begun: Callable[[], None] | None = None
    ) -> None:
        self.store, self.writer, self.state, self.begun = store, writer, state, begun

    def restore(self) -> int:
        """Goes on from the newest good checkpoint of this run or another, or begins with the weights of another one's.

        Returns the steps that are done.
        """
        found = self.store.start()
        if found is None:
            if self.begun is not None:
                self.begun()
            return 0
        self._refuse_other_format(found)
        is_own = found.manifest.facts.job_uid == self.store.place.run.uid
        told = json.loads((found.path / _COUNTERS).read_text(encoding="utf-8"))
        theirs = Adapted.model_validate_json(json.dumps(told["adapted"]))
        goes_on = is_own or self.store.policy.resume is Resume.RUN
        if not is_own:
            refuse_other_adapters(theirs, self.writer.adapted, found.path, goes_on=goes_on)
        self.writer.go_on_from(theirs)
        self.writer.state.read(found.path, weights_only=not goes_on)
        if not goes_on:
            return 0
        self.writer.objective.load_state_dict(told["objective"])
        self.writer.state.set_counters(told["counters"])
        return int(told["step"])

    def is_due(self, step: int) -> bool:
        """Whether to save after this step; moves a save on that is under way."""
        self.store.poll()
        return self.store.is_due(step)

    def save(self, step: int) -> None:
        """Saves the run after this step; in the background if the job says so."""
        self.writer.step = step
        self.store.save(
            Moment(
                step=step,
                state_format=self.state.format,
                layout={name: int(size) for name, size in asdict(self.state.layout).items()},
                versions={package: version(package) for package in _PACKAGES},
                data={"steps": step},
            ),
            self.state.expected_bytes,
        )

    def finish(self) -> None:
        """Waits for what is under way: a process that ends would take it along."""
        self.store.wait()

    def _refuse_other_format(self, found: Found) -> None:
        theirs = found.manifest.facts.state_format
        if theirs != self.state.format:
            raise BadConfiguration(
                f"{found.path} holds {theirs} and this job reads {self.state.format}; start from its Hugging Face "
                "export by spec.model.source instead of checkpoint.resumeFrom"
            )


def background() -> ThreadPoolExecutor:
    """One thread that writes files while training goes on."""
    return ThreadPoolExecutor(1, "state")
