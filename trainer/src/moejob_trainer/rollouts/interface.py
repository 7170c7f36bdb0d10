"""The seam between objectives and the engines that generate: requests, answers and versions of weights.

Objectives know these types and protocols only; vLLM, HTTP and the transports of weights lie behind them. Each token
carries the version of the weights that chose it, so ratios stay right when an engine is updated in the middle of an
answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moejob_trainer.errors import BadConfiguration

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """The reason why an answer has no further token."""

    STOP = "Stop"
    LENGTH = "Length"


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """The layers of a model that send tokens to experts, and the number of experts that each token goes to."""

    layers: int
    # Numbers of the layers with experts.
    routed: tuple[int, ...]
    experts: int
    per_token: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The distribution that tokens are drawn from, and where an answer ends."""

    temperature: float
    top_p: float
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    # Return the experts that each token was routed to in these layers.
    routing: RoutedLayers | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A request for one answer. Members of a group have equal prompts, which an engine's prefix cache computes once."""

    group: int
    member: int
    prompt: Tokens
    # Equal seeds, weights and prompts give equal answers.
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The tokens of one answer, a stop token included, with the engine's numbers of each. [N]"""

    request: GenerationRequest
    tokens: Tokens
    # Under the distribution that was sampled from: temperature and top-p applied.
    log_probabilities: Floats
    versions: Tokens
    finish_reason: FinishReason
    # Experts of each token of prompt and answer but the last, which engines do not read. [P + N - 1, routed layers, k]
    routing: npt.NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The cost of one publication of weights, and the result of its probe."""

    version: int
    seconds: float
    # Bytes that all ranks together have sent.
    size_bytes: int
    # Of a probe's tokens, |log-probability of the trainer - of the engine|; the mean and the largest over all engines.
    probe_mean: float
    probe_maximum: float
    # Largest mean that is allowed.
    probe_bound: float


class WrongWeights(BadConfiguration):
    """Engines that compute other numbers than the trainer. Raised on every rank, which can publish once more."""


class EnginesLost(RuntimeError):
    """A publication after which no engine has the weights. Raised on every rank, which can publish once more."""


class AnswerGenerator(Protocol):
    """Engines as one source of answers. Rank 0 alone uses it, with thousands of requests at a time."""

    async def generate(self, request: GenerationRequest, sampling: SamplingParams) -> Answer:
        """Return an answer of the engine with the least work among those that have the published weights."""

    async def wait_for_interruption(self) -> None:
        """Wait until no engine has the published weights and one is there to take them, or the run is asked to stop."""

    def measure_idle_share(self) -> float:
        """Return the share of time since the last call in which an engine had nothing to compute; the mean, 0 to 1."""


class WeightPublisher(Protocol):
    """Engines as readers of the trainer's weights. Every rank calls the same methods in the same order."""

    @property
    def stacked_elements(self) -> int:
        """Return the most elements of a stack of experts in what is published; 0: each expert by itself."""

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> SyncReport:
        """Give all engines these weights; afterwards they are awake and answer with this version.

        Raises EnginesLost when none is left that has them, WrongWeights when one computes something else with them.
        """

    def release(self) -> None:
        """Let engines that share the trainer's memory give it back until the next publication."""
