"""Publication of weights from the ranks of a trainer to its engines, and the probe that checks them.

Every rank calls the same methods in the same order; rank 0 alone sends requests to engines. Before engines compute with
new weights, they report the tensors that are missing, exactly and in every type. A publication ends with a probe, which
compares log-probabilities of the run's prompts by the trainer and by each engine. Only the probe notices a tensor that
was cut wrongly or laid out for another kernel: an engine generates with wrong weights, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

import numpy as np
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed import ProcessGroup

from moejob_trainer.distributed import messages
from moejob_trainer.distributed.encoding import TEXT
from moejob_trainer.rollouts.connection import EngineLost
from moejob_trainer.rollouts.fleet import Fleet, RolloutEngine
from moejob_trainer.rollouts.interface import EnginesLost, Floats, SyncReport, Tokens, WrongWeights
from moejob_trainer.rollouts.sync import Load, WeightSync
from moejob_trainer.rollouts.wire import WeightsLabel
from moejob_trainer.runtime.user_lines import to_stderr

# The trainer's log-probability of each token but the first. All ranks call it; rank 0 needs the answer. [N - 1]
Probe = Callable[[Tokens], Floats]


class Room(Protocol):
    """Memory of a GPU that a rank shares with engines; they sleep while the rank trains."""

    def tidy(self) -> None:
        """Give back memory that a publication does not need."""

    def leave(self) -> None:
        """Give back the memory of weights, too, while engines generate."""

    def enter(self) -> None:
        """Take all of the memory again."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a transport: the engines that have loaded all weights, and the bytes over all ranks."""

    engines: tuple[RolloutEngine, ...]
    size_bytes: int
    # Loads the same weights once more, into an engine that was away.
    catch_up: Load | None = None


class Transport(Protocol):
    """A transport of weights. Rank 0 alone has a `sync`."""

    @property
    def stacked_elements(self) -> int:
        """Return the most elements of a stack of experts that it carries; 0: each expert by itself."""

    def send(self, label: WeightsLabel, weights: Iterable[tuple[str, Tensor]], sync: WeightSync | None) -> Sent:
        """Start an update on all engines and let them load all weights; the caller finishes the update. Collective."""

    def close(self) -> None:
        """Remove the files for engines. Collective."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The text of the probe, the trainer's log-probabilities, and the largest mean distance of an engine."""

    tokens: Tokens
    probe: Probe
    # Measured in the trainer, by all ranks together: at the first publication, and again after a wrong one.
    bound: Callable[[], float]
    # A mismatch is a warning, and the run continues.
    only_warns: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The trainer's log-probabilities of the probe's text, and the largest mean distance from them."""

    log_probabilities: Floats
    bound: float


@dataclass(frozen=True, slots=True)
class _Proof:
    """|log-probability of the trainer - of an engine| over the probe's tokens and all engines."""

    mean: float
    maximum: float
    problem: str | None = None
    # No engine has taken the weights, so none was probed.
    is_lost: bool = False


_PROOF = TypeAdapter(_Proof)


class Publisher:
    """A WeightPublisher over HTTP, made by all ranks together. `fleet` is rank 0's; the others have none."""

    def __init__(
        self,
        *,
        fleet: Fleet | None,
        world: ProcessGroup | None,
        transport: Transport,
        trial: Trial,
        room: Room | None = None,
    ) -> None:
        self._fleet, self._world, self._transport, self.trial = fleet, world, transport, trial
        # None where no memory is shared: such engines never sleep.
        self._room = room
        self._bound: float | None = None
        self._sync = None if fleet is None else WeightSync(fleet, sleeps=room is not None)
        # An earlier start of the trainer gave the same version numbers to other weights.
        self._run = messages.broadcast(uuid4().hex[:8], TEXT, world)

    @property
    def stacked_elements(self) -> int:
        """Return the most elements of a stack of experts in what is published; 0: each expert by itself."""
        return self._transport.stacked_elements

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> SyncReport:
        """Give all engines these weights; afterwards they answer with this version. EnginesLost when none is left."""
        began, label = time.monotonic(), WeightsLabel(version, self._run)
        if self._room is not None:
            self._room.tidy()
            messages.barrier(self._world)
        sent = self._transport.send(label, weights, self._sync)
        trainers = self.trial.probe(self.trial.tokens)
        if self._bound is None:
            self._bound = self.trial.bound()
        bound = self._bound
        if self._room is not None:
            # Engines are about to take memory for the answers' keys and values.
            self._room.leave()
            messages.barrier(self._world)
        proof = None if self._sync is None else self._proven(sent, label, Expected(trainers, bound))
        proof = messages.broadcast(proof, _PROOF, self._world)
        if proof.problem is None:
            return SyncReport(version, time.monotonic() - began, sent.size_bytes, proof.mean, proof.maximum, bound)
        if proof.is_lost:
            raise EnginesLost(proof.problem)
        # Rounding may change trained weights more than the first ones: measure the bound again.
        self._bound = None
        raise WrongWeights(proof.problem)

    def release(self) -> None:
        """Let engines on the trainer's GPUs sleep; those that share no memory with it keep theirs."""
        if self._room is None:
            return
        if self._sync is not None:
            self._sync.run(self._sync.sleep())
        # No rank takes memory that an engine still has.
        messages.barrier(self._world)
        self._room.enter()

    def close(self) -> None:
        """Remove the files for engines, and end the connections."""
        self._transport.close()
        if self._fleet is not None:
            self._fleet.connection.run(self._fleet.unwatch())
            self._fleet.connection.close()

    def _proven(self, sent: Sent, label: WeightsLabel, expected: Expected) -> _Proof:
        """Compare engines with the trainer. Return a problem and raise nothing: the other ranks wait for the result."""
        if self._fleet is None or self._sync is None:
            raise ValueError("rank 0 alone proves a publication")
        sync, tokens = self._sync, self.trial.tokens
        found: list[tuple[RolloutEngine, Floats]] = []

        async def probed(engine: RolloutEngine) -> None:
            found.append((engine, await sync.probed(engine, tokens)))

        async def compared() -> _Proof | None:
            complete, incomplete = await sync.check(sent.engines)
            if incomplete is not None:
                return _Proof(0.0, 0.0, incomplete)
            engines = await sync.each(await sync.finish(complete, label), probed)
            if not engines:
                lost = f"no engine has kept the weights {label}: {fleet.reasons()}"
                return _Proof(0.0, 0.0, lost, is_lost=True)
            problem = self._problem(expected, found)
            if problem is not None:
                await sync.rest(engines)
                return _Proof(0.0, 0.0, problem)
            await sync.serve(engines, self._again(sent, label, expected))
            warn_of_others(fleet.engines, label, is_read_later=sent.catch_up is not None)
            return None

        fleet = self._fleet
        failure = sync.run(compared())
        if failure is not None:
            return failure
        apart = np.concatenate([np.abs(expected.log_probabilities - theirs) for _, theirs in found])
        return _Proof(float(apart.mean()), float(apart.max()))

    def _again(self, sent: Sent, label: WeightsLabel, expected: Expected) -> Load | None:
        """Return the function that loads and probes the same weights in an engine that was away."""
        load, sync = sent.catch_up, self._sync
        if load is None or sync is None:
            return None

        async def again(engine: RolloutEngine) -> None:
            await sync.whole(engine, label, load)
            problem = self._problem(expected, [(engine, await sync.probed(engine, self.trial.tokens))])
            if problem is not None:
                raise EngineLost(problem)

        return again

    def _problem(self, expected: Expected, found: Sequence[tuple[RolloutEngine, Floats]]) -> str | None:
        """Return the problem of engines; with onMismatch Warn, log it and return None."""
        problem = wrong(expected, [(engine.url, theirs) for engine, theirs in found])
        if problem is None or not self.trial.only_warns:
            return problem
        to_stderr(f"warning: {problem}")
        return None


def warn_of_others(engines: Sequence[RolloutEngine], label: WeightsLabel, *, is_read_later: bool) -> None:
    """Write a line about the engines that a publication has not reached, where there are any."""
    late = left_out(engines, label, is_read_later=is_read_later)
    if late is not None:
        to_stderr(late)


def left_out(engines: Sequence[RolloutEngine], label: WeightsLabel, *, is_read_later: bool) -> str | None:
    """Return a sentence about the engines that a publication has not reached, None when there are none; pure."""
    without = [engine.problem for engine in engines if not engine.serves]
    if not without:
        return None
    then = "reads them by itself once it answers" if is_read_later else "waits for the next publication"
    return (
        f"warning: the weights of step {label.version} have reached {len(engines) - len(without)} of {len(engines)} "
        f"engines; each of the others gets no work and {then}: {'; '.join(without)}"
    )


def wrong(expected: Expected, found: Sequence[tuple[str, Floats]]) -> str | None:
    """Return a sentence with both numbers when an engine is too far from the trainer; pure."""
    trainers = expected.log_probabilities
    for url, theirs in found:
        apart = float(np.abs(trainers - theirs).mean())
        # Not a number is far from every number.
        if not apart <= expected.bound:
            return (
                f"after a synchronization {url} gives the probe a mean log-probability of {theirs.mean():.5f} and the "
                f"trainer {trainers.mean():.5f}; their mean |difference| is {apart:.5f} where {expected.bound:.3g} is "
                "allowed: the engine computes with other weights, or computes otherwise; compare in float32 "
                "(model.dtype), and where both are right raise grpo.rollout.probe.bound or set its onMismatch to Warn"
            )
    return None
