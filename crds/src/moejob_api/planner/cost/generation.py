"""Seconds in which one engine generates its answers of a step, from shapes and published speeds.

How long answers get is not known before a run. They are taken to end at random, after each token with the same chance:
on average with a third of maxNewTokens, and one in twenty reaches maxNewTokens.

    share of answers longer than x tokens = exp(-3 x / maxNewTokens)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from moejob_api.arithmetic import ceil_div
from moejob_api.hardware import Hardware
from moejob_api.job import Spec
from moejob_api.job.grpo import Grpo
from moejob_api.models.parameters import active_parameters, total_parameters
from moejob_api.models.shape import ModelShape
from moejob_api.planner.cost.rates import (
    ENGINE_GEMM_SHARE,
    ENGINE_LAYER_SECONDS,
    ENGINE_SEQUENCE_SECONDS,
    ENGINE_SUM_SECONDS,
    MOST_AT_ONCE,
    NVLINK_SHARE,
)
from moejob_api.planner.memory.engine import EngineMemory, estimate_engine_among

# maxNewTokens by the mean of answers that no limit cuts off, and what the limit leaves of that mean, by maxNewTokens.
LENGTH_DECAY = 3.0
TYPICAL_SHARE = (1 - exp(-LENGTH_DECAY)) / LENGTH_DECAY
# Intervals in which the number of answers that are still generated is taken to be constant.
_INTERVALS = 16


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """One engine of a job. answers: its share of a step's. at_once: as many of usual length as it has memory for."""

    shape: ModelShape
    hardware: Hardware
    memory: EngineMemory
    element_bytes: int
    active: int
    # Parameters of experts that a single token does not meet.
    idle: int
    answers: int
    at_once: int
    group_size: int
    longest_tokens: int
    prompt_tokens: float

    @property
    def mean_tokens(self) -> float:
        """Tokens of an answer, on average."""
        return TYPICAL_SHARE * self.longest_tokens

    @property
    def group_tokens(self) -> float:
        """Tokens of the longest answer of a group, on average."""
        ended_share = 1 - exp(-LENGTH_DECAY)
        powers = (ended_share**power / power for power in range(1, self.group_size + 1))
        return self.longest_tokens / LENGTH_DECAY * sum(powers)

    def round_seconds(self, at_once: float) -> float:
        """Return the seconds of one token of each of `at_once` answers."""
        layer_seconds = ENGINE_LAYER_SECONDS + self._summing_seconds(at_once)
        return (
            max(self._reading_seconds(at_once), self._computing_seconds(at_once))
            + at_once * ENGINE_SEQUENCE_SECONDS
            + len(self.shape.layers) * layer_seconds
        )

    def reading_again_seconds(self, at_once: float) -> float:
        """Return the seconds in which prompts and unfinished answers are read again, after other weights."""
        return self._computing_seconds(at_once) * (self.prompt_tokens + self.mean_tokens)

    def _reading_seconds(self, at_once: float) -> float:
        """Weights and caches pass once; an expert's weights pass if any sequence chooses the expert."""
        unread = 0.0
        if self.shape.experts is not None:
            chosen_share = self.shape.experts.per_token / self.shape.experts.count
            unread = self.idle * (1 - chosen_share) ** (at_once - 1) * self.element_bytes / self.memory.gpus
        read = self.memory.weights - unread + at_once * self.memory.sequence_bytes
        return read / self.hardware.memory_bytes_per_second

    def _computing_seconds(self, at_once: float) -> float:
        flops = 2.0 * self.active * at_once / self.memory.gpus
        return flops / (ENGINE_GEMM_SHARE * self.hardware.bf16_flops_per_second)

    def _summing_seconds(self, at_once: float) -> float:
        """The GPUs of an engine, which share a node, sum what attention and experts of a layer give."""
        if self.memory.gpus == 1:
            return 0.0
        rows = 2 * (self.memory.gpus - 1) / self.memory.gpus * at_once * self.shape.hidden * self.element_bytes
        return 2 * (ENGINE_SUM_SECONDS + rows / (self.hardware.nvlink_bytes_per_second * NVLINK_SHARE))


@dataclass(frozen=True, slots=True)
class GenerationTime:
    """Seconds of one engine. all_answers: a step's answers, from the first request to the last token.

    steady: as many answers, where the engine always has further ones to generate. longest: one of maxNewTokens, with
    its wait for a place. reading: what unfinished answers cost after a publication.
    """

    all_answers: float
    steady: float
    longest: float
    reading: float


def typical_spec(spec: Spec) -> Spec:
    """Return the job with sequences of usual length: prompts and answers of GRPO are seldom as long as they may be."""
    if spec.grpo is None:
        return spec
    length = max(1, round(TYPICAL_SHARE * spec.data.max_length))
    return spec.model_copy(update={"data": spec.data.model_copy(update={"max_length": length})})


def engine_speed(spec: Spec, grpo: Grpo, shape: ModelShape, engines: int, hardware: Hardware) -> EngineSpeed:
    """Return the speed of one of several engines that share the answers of a step."""
    memory = estimate_engine_among(typical_spec(spec), grpo, shape, engines)
    places = memory.useful_sequences if memory.sequences is None else memory.sequences
    active = active_parameters(shape)
    return EngineSpeed(
        shape=shape,
        hardware=hardware,
        memory=memory,
        element_bytes=spec.model.dtype.size_bytes,
        active=active,
        idle=total_parameters(shape) - active,
        answers=ceil_div(grpo.answers_per_step, engines),
        at_once=max(1, min(places, MOST_AT_ONCE)),
        group_size=grpo.group_size,
        longest_tokens=grpo.max_new_tokens,
        prompt_tokens=TYPICAL_SHARE * max(0, spec.data.max_length - grpo.max_new_tokens),
    )


def generation_time(engine: EngineSpeed, staleness: int, *, reads_again: bool) -> GenerationTime:
    """Return the seconds of one engine, where answers may be this many versions older than the weights."""
    unfinished = _unfinished_answers(engine, staleness)
    at_once = max(1.0, min(engine.at_once, unfinished))
    seconds, waiting = engine.round_seconds(at_once), max(0.0, unfinished - engine.at_once)
    return GenerationTime(
        all_answers=_all_answers_seconds(engine),
        steady=engine.answers * engine.mean_tokens * seconds / at_once,
        longest=engine.longest_tokens * seconds + waiting * engine.mean_tokens * seconds / at_once,
        reading=engine.reading_again_seconds(at_once) if reads_again else 0.0,
    )


def _unfinished_answers(engine: EngineSpeed, staleness: int) -> float:
    """Return the answers of one engine that are generated at a time, on average, were there room for all.

    While a step collects its groups, between none and all of them are among the (staleness + 1) steps' that are asked
    for. Finished answers wait for the longest of their group.
    """
    groups = staleness + 0.5
    return groups * engine.answers * engine.mean_tokens / engine.group_tokens


def _all_answers_seconds(engine: EngineSpeed) -> float:
    """As long as answers wait, all places are taken; then places stay empty, and the longest answer is the last."""
    at_once = min(engine.answers, engine.at_once)
    waiting = (engine.answers - at_once) * engine.mean_tokens * engine.round_seconds(at_once) / at_once
    share = 1 / _INTERVALS
    running = (at_once * exp(-LENGTH_DECAY * (interval + 0.5) * share) for interval in range(_INTERVALS))
    tail = sum(engine.round_seconds(max(1.0, count)) for count in running) * share * engine.longest_tokens
    return waiting + tail
