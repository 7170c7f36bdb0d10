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
from moejob_trainer.rollouts.fleet import EngineFleet, RolloutEngine
from moejob_trainer.rollouts.interface import EnginesLost, Floats, SyncReport, Tokens, WrongWeights
from moejob_trainer.rollouts.sync import LoadWeights, WeightSync
from moejob_trainer.rollouts.wire import WeightsLabel
from moejob_trainer.runtime.user_lines import to_stderr

# The trainer's log-probability of each token but the first. All ranks call it; rank 0 needs the answer. [N - 1]
ProbeFunction = Callable[[Tokens], Floats]


class SharedGpuMemory(Protocol):
    """Memory of a GPU that a rank shares with engines; they sleep while the rank trains."""

    def free_unused(self) -> None:
        """Give back memory that a publication does not need."""

    def release(self) -> None:
        """Give back the memory of weights, too, while engines generate."""

    def acquire(self) -> None:
        """Take all of the memory again."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result of a transport: the engines that have loaded all weights, and the bytes over all ranks."""

    engines: tuple[RolloutEngine, ...]
    size_bytes: int
    # Loads the same weights once more, into an engine that was away.
    catch_up: LoadWeights | None = None


class EngineTransport(Protocol):
    """A transport of weights. Rank 0 alone has a `sync`."""

    @property
    def stacked_elements(self) -> int:
        """Return the most elements of a stack of experts that it carries; 0: each expert by itself."""

    def send(
        self, label: WeightsLabel, weights: Iterable[tuple[str, Tensor]], sync: WeightSync | None
    ) -> TransferResult:
        """Start an update on all engines and let them load all weights; the caller finishes the update. Collective."""

    def close(self) -> None:
        """Remove the files for engines. Collective."""


@dataclass(frozen=True, slots=True)
class ProbeTerms:
    """The text of the probe, the trainer's log-probabilities, and the largest mean distance of an engine."""

    tokens: Tokens
    probe: ProbeFunction
    # Measured in the trainer, by all ranks together: at the first publication, and again after a wrong one.
    bound: Callable[[], float]
    # A mismatch is a warning, and the run continues.
    only_warns: bool = False


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """The way in which a job treats its engines between and during publications."""

    # None where no memory is shared: such engines never sleep.
    gpu_memory: SharedGpuMemory | None = None
    # Engines that share GPUs or cores with the trainer compute nothing while it trains.
    is_colocated: bool = False
    # Unfinished answers continue with keys and values of older weights.
    keeps_cache: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedProbe:
    """The trainer's log-probabilities of the probe's text, and the largest mean distance from them."""

    log_probabilities: Floats
    bound: float


@dataclass(frozen=True, slots=True)
class _ProbeResult:
    """|log-probability of the trainer - of an engine| over the probe's tokens and all engines."""

    mean: float
    maximum: float
    problem: str | None = None
    # No engine has taken the weights, so none was probed.
    is_lost: bool = False


_PROBE_RESULT = TypeAdapter(_ProbeResult)


class Publisher:
    """A WeightPublisher over HTTP, made by all ranks together. `fleet` is rank 0's; the others have none."""

    def __init__(
        self,
        *,
        fleet: EngineFleet | None,
        world: ProcessGroup | None,
        transport: EngineTransport,
        probe_terms: ProbeTerms,
        engine_terms: EngineTerms = EngineTerms(),
    ) -> None:
        self._fleet, self._world, self._transport, self.probe_terms = fleet, world, transport, probe_terms
        self._gpu_memory, self._is_colocated = engine_terms.gpu_memory, engine_terms.is_colocated
        self._bound: float | None = None
        sleeps, keeps_cache = self._gpu_memory is not None, engine_terms.keeps_cache
        self._sync = None if fleet is None else WeightSync(fleet, sleeps=sleeps, keeps_cache=keeps_cache)
        # An earlier start of the trainer gave the same version numbers to other weights.
        self._run = messages.broadcast_value(uuid4().hex[:8], TEXT, world)

    @property
    def stacked_elements(self) -> int:
        """Return the transport's bound on a stack of experts."""
        return self._transport.stacked_elements

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> SyncReport:
        """Give all engines these weights; afterwards they answer with this version. EnginesLost when none is left."""
        began_at, label = time.monotonic(), WeightsLabel(version, self._run)
        if self._gpu_memory is not None:
            self._gpu_memory.free_unused()
            messages.wait_for_group(self._world)
        transfer = self._transport.send(label, weights, self._sync)
        trainer_log_probabilities = self.probe_terms.probe(self.probe_terms.tokens)
        if self._bound is None:
            self._bound = self.probe_terms.bound()
        bound = self._bound
        if self._gpu_memory is not None:
            # Engines are about to take memory for the answers' keys and values.
            self._gpu_memory.release()
            messages.wait_for_group(self._world)
        probe_result = (
            None
            if self._sync is None
            else self._probe_engines(transfer, label, ExpectedProbe(trainer_log_probabilities, bound))
        )
        probe_result = messages.broadcast_value(probe_result, _PROBE_RESULT, self._world)
        if probe_result.problem is None:
            return SyncReport(
                version,
                time.monotonic() - began_at,
                transfer.size_bytes,
                probe_result.mean,
                probe_result.maximum,
                bound,
            )
        if probe_result.is_lost:
            raise EnginesLost(probe_result.problem)
        # Rounding may change trained weights more than the first ones: measure the bound again.
        self._bound = None
        raise WrongWeights(probe_result.problem)

    def release(self) -> None:
        """Stop engines that share GPUs or cores with the trainer, and let those on its GPUs sleep.

        Unfinished answers wait on rank 0 for the next publication, and continue from there.
        """
        if self._is_colocated and self._sync is not None:
            self._sync.run(self._sync.stop_answers())
        if self._gpu_memory is None:
            return
        if self._sync is not None:
            self._sync.run(self._sync.sleep_serving())
        # No rank takes memory that an engine still has.
        messages.wait_for_group(self._world)
        self._gpu_memory.acquire()

    def close(self) -> None:
        """Remove the files for engines, and end the connections."""
        self._transport.close()
        if self._fleet is not None:
            self._fleet.connection.run(self._fleet.stop_watching())
            self._fleet.connection.close()

    def _probe_engines(self, transfer: TransferResult, label: WeightsLabel, expected: ExpectedProbe) -> _ProbeResult:
        """Compare engines with the trainer. Return a problem and raise nothing: the other ranks wait for the result."""
        if self._fleet is None or self._sync is None:
            raise ValueError("rank 0 alone proves a publication")
        sync, tokens = self._sync, self.probe_terms.tokens
        probes: list[tuple[RolloutEngine, Floats]] = []

        async def probe_engine(engine: RolloutEngine) -> None:
            probes.append((engine, await sync.probe_engine(engine, tokens)))

        async def compare_engines() -> _ProbeResult | None:
            complete, incomplete = await sync.check_engines(transfer.engines)
            if incomplete is not None:
                return _ProbeResult(0.0, 0.0, incomplete)
            engines = await sync.run_on_each(await sync.finish_update(complete, label), probe_engine)
            if not engines:
                lost = f"no engine has kept the weights {label}: {fleet.describe_problems()}"
                return _ProbeResult(0.0, 0.0, lost, is_lost=True)
            problem = await self._lose_wrong_engines(fleet, expected, probes)
            if problem is not None:
                await sync.sleep_unused(engines)
                return _ProbeResult(0.0, 0.0, problem)
            await sync.resume_serving(engines, self._catch_up_load(transfer, label, expected))
            warn_of_unreached(fleet.engines, label, is_read_later=transfer.catch_up is not None)
            return None

        fleet = self._fleet
        failure = sync.run(compare_engines())
        if failure is not None:
            return failure
        distances = np.concatenate(
            [np.abs(expected.log_probabilities - engine_log_probabilities) for _, engine_log_probabilities in probes]
        )
        return _ProbeResult(float(distances.mean()), float(distances.max()))

    async def _lose_wrong_engines(
        self, fleet: EngineFleet, expected: ExpectedProbe, probes: Sequence[tuple[RolloutEngine, Floats]]
    ) -> str | None:
        """Give up all answers of engines that compute something else; return the problem of the first, else None."""
        problems = []
        for engine, engine_log_probabilities in probes:
            problem = self._find_problem(expected, [(engine, engine_log_probabilities)])
            if problem is not None:
                problems.append(problem)
                await fleet.lose_engine(engine, problem)
        return problems[0] if problems else None

    def _catch_up_load(
        self, transfer: TransferResult, label: WeightsLabel, expected: ExpectedProbe
    ) -> LoadWeights | None:
        """Return the function that loads and probes the same weights in an engine that was away."""
        load, sync = transfer.catch_up, self._sync
        if load is None or sync is None:
            return None

        async def load_again(engine: RolloutEngine) -> None:
            await sync.load_engine(engine, label, load)
            problem = self._find_problem(expected, [(engine, await sync.probe_engine(engine, self.probe_terms.tokens))])
            if problem is not None:
                raise EngineLost(problem)

        return load_again

    def _find_problem(self, expected: ExpectedProbe, probes: Sequence[tuple[RolloutEngine, Floats]]) -> str | None:
        """Return the problem of engines; with onMismatch Warn, log it and return None."""
        problem = probe_problem(
            expected, [(engine.url, engine_log_probabilities) for engine, engine_log_probabilities in probes]
        )
        if problem is None or not self.probe_terms.only_warns:
            return problem
        to_stderr(f"warning: {problem}")
        return None


def warn_of_unreached(engines: Sequence[RolloutEngine], label: WeightsLabel, *, is_read_later: bool) -> None:
    """Write a line about the engines that a publication has not reached, where there are any."""
    warning = unreached_warning(engines, label, is_read_later=is_read_later)
    if warning is not None:
        to_stderr(warning)


def unreached_warning(engines: Sequence[RolloutEngine], label: WeightsLabel, *, is_read_later: bool) -> str | None:
    """Return a sentence about the engines that a publication has not reached, None when there are none; pure."""
    problems = [engine.problem for engine in engines if not engine.is_serving]
    if not problems:
        return None
    next_chance = "reads them by itself once it answers" if is_read_later else "waits for the next publication"
    return (
        f"warning: the weights of step {label.version} have reached {len(engines) - len(problems)} of {len(engines)} "
        f"engines; each of the others gets no work and {next_chance}: {'; '.join(problems)}"
    )


def probe_problem(expected: ExpectedProbe, probes: Sequence[tuple[str, Floats]]) -> str | None:
    """Return a sentence with both numbers when an engine is too far from the trainer; pure."""
    trainer_log_probabilities = expected.log_probabilities
    for url, engine_log_probabilities in probes:
        distance = float(np.abs(trainer_log_probabilities - engine_log_probabilities).mean())
        # Not a number is far from every number.
        if not distance <= expected.bound:
            return (
                f"after a synchronization {url} gives the probe a mean log-probability of "
                f"{engine_log_probabilities.mean():.5f} and the "
                f"trainer {trainer_log_probabilities.mean():.5f}; their mean |difference| is {distance:.5f} where "
                f"{expected.bound:.3g} is allowed: the engine computes with other weights, or computes otherwise; "
                "compare in float32 (model.dtype), and where both are right raise grpo.rollout.probe.bound or set its "
                "onMismatch to Warn"
            )
    return None
