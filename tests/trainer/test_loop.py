"""Saves and endings of the loop, with everything around it faked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from moejob_trainer.loop import LoopOutcome, TrainingRun, run_training_loop
from moejob_trainer.objectives import ObjectiveState, StoppedWaiting
from moejob_trainer.training import LossFunction, LossTerms, MicroBatch, TokenOutputs, TrainingEngine, UpdateResult


@dataclass
class World:
    """Training engine, objective, checkpoints and stop at once; steps are known by their numbers."""

    begun: int = 0
    every: int = 1
    skipped: frozenset[int] = frozenset()
    stopped_at: int | None = None
    # Asked to stop while the step after this one waits for its data.
    waiting_at: int | None = None
    best: frozenset[int] = frozenset()
    over_at: int | None = None
    done: int = 0
    saved: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def restore(self) -> int:
        self.done = self.begun
        return self.begun

    def poll(self) -> None: ...

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def save(self, step: int) -> None:
        self.saved.append(step)

    def has_agreed(self) -> bool:
        return self.done == self.stopped_at

    def is_among_best(self, step: int) -> bool:
        return step in self.best

    def is_over(self) -> bool:
        return self.over_at is not None and self.done >= self.over_at

    def updates(self, step: int, engine: TrainingEngine) -> Iterator[Sequence[MicroBatch]]:  # noqa: ARG002
        if step == self.waiting_at:
            raise StoppedWaiting
        yield []

    def loss(self, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:  # noqa: ARG002
        raise AssertionError("there is no batch")

    def snapshot_state(self) -> ObjectiveState:
        return ObjectiveState({})

    def load_state(self, state: ObjectiveState) -> None: ...

    def begin_step(self, step: int) -> None:
        self.steps.append(step)

    def update(self, batches: Sequence[MicroBatch], loss: LossFunction) -> UpdateResult:  # noqa: ARG002
        self.done += 1
        return UpdateResult(0.0, 0.0, 0.0, 0, is_applied=self.done not in self.skipped)

    def evaluate(self, batches: Sequence[MicroBatch], loss: LossFunction) -> UpdateResult:  # noqa: ARG002
        raise AssertionError("nothing is evaluated")

    def compute_outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:  # noqa: ARG002
        raise AssertionError("nobody asks")

    def compute_reference_outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        """Nothing: no objective asks."""
        raise NotImplementedError

    def export_weights(self, stacked_elements: int = 0) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002  # a protocol's
        raise AssertionError("nobody asks")


CASES: dict[str, tuple[World, LoopOutcome, list[int]]] = {
    "whenever it is due": (World(every=2), LoopOutcome.COMPLETED, [2, 4, 6]),
    "at the end, due or not": (World(every=4), LoopOutcome.COMPLETED, [4, 6]),
    "after what was restored": (World(begun=3), LoopOutcome.COMPLETED, [4, 5, 6]),
    "nothing when all was done before": (World(begun=6), LoopOutcome.COMPLETED, []),
    "not while updates are skipped": (World(skipped=frozenset({4, 5})), LoopOutcome.COMPLETED, [1, 2, 3, 6]),
    "later when the update was skipped": (World(every=3, skipped=frozenset({3})), LoopOutcome.COMPLETED, [4, 6]),
    "what its evaluation makes one of the best": (
        World(every=4, best=frozenset({3})),
        LoopOutcome.COMPLETED,
        [3, 4, 6],
    ),
    "one of the best though its update was skipped": (
        World(every=9, best=frozenset({3}), skipped=frozenset({3})),
        LoopOutcome.COMPLETED,
        [3, 6],
    ),
    "where it ends early, due or not": (World(every=9, over_at=4), LoopOutcome.COMPLETED, [4]),
    "nothing when it had ended early before": (World(begun=4, over_at=4), LoopOutcome.COMPLETED, []),
    "and is done when asked to stop where it ends early": (
        World(every=9, over_at=4, stopped_at=4),
        LoopOutcome.COMPLETED,
        [4],
    ),
    "before it stops": (World(every=9, stopped_at=4), LoopOutcome.PREEMPTED, [4]),
    "before it stops after a skipped update": (
        World(every=9, stopped_at=4, skipped=frozenset({4})),
        LoopOutcome.PREEMPTED,
        [4],
    ),
    "before it stops while a step waits": (World(every=9, waiting_at=4), LoopOutcome.PREEMPTED, [4]),
    "nothing twice when it stops while a step waits": (World(every=2, waiting_at=4), LoopOutcome.PREEMPTED, [2, 4]),
    "nothing when it stops before a step": (World(begun=3, waiting_at=3), LoopOutcome.PREEMPTED, []),
    "and is done when stopped at the end": (World(every=9, stopped_at=6), LoopOutcome.COMPLETED, [6]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loop_saves(name: str) -> None:
    world, outcome, saved = CASES[name]
    reported: list[int] = []
    run = TrainingRun(
        engine=world,
        objective=world,
        checkpoints=world,
        stop=world,
        total_steps=6,
        report=lambda step, _: reported.append(step),
        is_among_best=world.is_among_best,
        is_over=world.is_over,
    )
    assert (run_training_loop(run), world.saved) == (outcome, saved)
    assert reported == [*range(world.begun + 1, world.done + 1)]
    # Counted by the loop, from what was restored: the engine's updates do not say how far the schedule is.
    waiting_steps = [] if world.waiting_at is None else [world.waiting_at]
    assert world.steps == [*(step - 1 for step in reported), *waiting_steps]
