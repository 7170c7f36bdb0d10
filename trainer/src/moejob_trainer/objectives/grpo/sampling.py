"""Groups of answers with their rewards, which rank 0 samples.

All requests of a group are sent at once, and each answer is scored as soon as it arrives. This module also decides
which groups a step learns from, and how much a long answer loses. Knows the interface of a generator, and nothing of
the engines behind it, of advantages or of losses; nor when a group is asked for, which is group_queue.py's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from moejob_api.job.grpo import Grpo, OverlongAnswers
from moejob_trainer.data.prompt_loader import NumberedPrompt
from moejob_trainer.data.shuffling import mix_keys
from moejob_trainer.rewards.completion import Completion
from moejob_trainer.rewards.scorer import CompletionScore, Scorer
from moejob_trainer.rollouts.interface import Answer, AnswerGenerator, GenerationRequest, SamplingParams
from moejob_trainer.runtime.loop_thread import LoopThread

Floats = npt.NDArray[np.floating[Any]]
Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ScoredAnswer:
    """An answer with its text and its reward."""

    answer: Answer
    text: str
    score: CompletionScore
    # The weighted sum of rewards, less the penalty of an overlong answer.
    reward: float
    # When the answer arrived, before it was scored; by the monotonic clock.
    answered_at: float


@dataclass(frozen=True, slots=True, eq=False)
class AnswerGroup:
    """All answers to one prompt."""

    prompt: NumberedPrompt
    answers: tuple[ScoredAnswer, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return the reward of each answer, NaN where a reward failed."""
        return tuple(answer.reward for answer in self.answers)

    def without_routing(self) -> AnswerGroup:
        """Return the same answers without the experts of their tokens."""
        answers = (replace(answer, answer=replace(answer.answer, routing=None)) for answer in self.answers)
        return replace(self, answers=tuple(answers))


@dataclass(frozen=True, slots=True, eq=False)
class FinishedGroup:
    """A group with all answers and rewards, and the version of the weights when it was asked for."""

    group: AnswerGroup
    version: int

    @property
    def number(self) -> int:
        """Return the number of its prompt."""
        return self.group.prompt.number

    @property
    def is_complete(self) -> bool:
        """Return True: it waits for a step only."""
        return True


class LeftOutReason(StrEnum):
    """The reason why a step does not learn from a group."""

    REWARD_FAILED = "RewardFailed"
    NO_SIGNAL = "NoSignal"


@dataclass(frozen=True, slots=True, eq=False)
class LeftOutGroup:
    """A group whose answers the step does not train on, without the experts of its tokens."""

    group: AnswerGroup
    reason: LeftOutReason


@dataclass(frozen=True, slots=True, eq=False)
class SampledGroups:
    """The groups of a step, and the groups that it leaves out, with the reasons."""

    groups: tuple[AnswerGroup, ...]
    # Groups in which an answer has no reward.
    dropped: int = 0
    # Groups that dynamic sampling replaced because they had no signal.
    replaced: int = 0
    # Tokens of all answers, also of those in groups that are left out.
    tokens: int = 0
    # Seconds in which the step waited, all answers had arrived and rewards were still computed.
    reward_seconds: float = 0.0
    left_out_groups: tuple[LeftOutGroup, ...] = ()
    # Groups that the step waited for, for they would have been too old in the next one, and those asked for again.
    awaited: int = 0
    asked_again: int = 0
    # Groups that were asked for and that no step has taken.
    pending: int = 0

    def without_routing(self) -> SampledGroups:
        """Return the same groups, each without the routing of its answers."""
        return replace(self, groups=tuple(group.without_routing() for group in self.groups))


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Samples answers from a generator and scores them. `decode` makes the text of an answer, without its end."""

    generator: AnswerGenerator
    scorer: Scorer
    decode: Callable[[Sequence[int]], str]
    seed: int
    # The event loop in which the scorer was started; None: it has not been started.
    loop: LoopThread | None = None

    async def sample_group(
        self, prompt: NumberedPrompt, members: int, params: SamplingParams, grpo: Grpo, attempt: int = 0
    ) -> AnswerGroup:
        """Return the answers of all members to a prompt; equal seeds, attempts and weights give equal answers."""
        sampled_answers = (self._sample_answer(prompt, member, params, grpo, attempt) for member in range(members))
        return AnswerGroup(prompt, tuple(await asyncio.gather(*sampled_answers)))

    async def _sample_answer(
        self, prompt: NumberedPrompt, member: int, params: SamplingParams, grpo: Grpo, attempt: int
    ) -> ScoredAnswer:
        tokens = np.asarray(prompt.prompt.tokens, np.int32)
        # The first attempt has the seed that it had before there were others.
        keys = (self.seed, prompt.number, member, *([attempt] if attempt else []))
        request = GenerationRequest(prompt.number, member, tokens, mix_keys(*keys) % 2**31)
        answer = await self.generator.generate(request, params)
        answered_at = time.monotonic()
        text = self.decode([token for token in answer.tokens.tolist() if token not in params.stop_tokens])
        completion = Completion(
            *(prompt.prompt.text, text, len(answer.tokens), params.max_new_tokens),
            *(prompt.prompt.fields, prompt.prompt.messages),
        )
        score = await self.scorer.score_completion(completion)
        penalty = overlong_penalty(np.array([len(answer.tokens)]), params.max_new_tokens, grpo.overlong)
        return ScoredAnswer(answer, text, score, score.total + float(penalty[0]), answered_at)


def left_out_reason(group: AnswerGroup, grpo: Grpo) -> LeftOutReason | None:
    """Return the reason why a step does not choose a group, None where it does."""
    rewards = np.array([group.rewards])
    if not has_all_rewards(rewards)[0]:
        return LeftOutReason.REWARD_FAILED
    if grpo.dynamic_sampling is not None and not has_signal(rewards)[0]:
        return LeftOutReason.NO_SIGNAL
    return None


def most_prompts_per_step(grpo: Grpo) -> int:
    """Return the most prompts of a step: with dynamic sampling, groups without signal are replaced by others."""
    if grpo.dynamic_sampling is None:
        return grpo.prompts_per_step
    return math.ceil(grpo.dynamic_sampling.over_sampling * grpo.prompts_per_step)


def compose_step(groups: Sequence[AnswerGroup], grpo: Grpo) -> SampledGroups:
    """Return the groups that a step has taken as its groups, and the groups that it leaves out, in the prompts' order.

    Groups without signal fill the places that no others have taken.
    """
    by_reason: dict[LeftOutReason | None, list[AnswerGroup]] = {None: []} | {reason: [] for reason in LeftOutReason}
    for group in sorted(groups, key=lambda group: group.prompt.number):
        by_reason[left_out_reason(group, grpo)].append(group)
    chosen, failed, flat = (by_reason[key] for key in (None, LeftOutReason.REWARD_FAILED, LeftOutReason.NO_SIGNAL))
    missing_count = grpo.prompts_per_step - len(chosen)
    filling, replaced = flat[:missing_count], flat[missing_count:]
    left_out_groups = (
        *(LeftOutGroup(group.without_routing(), LeftOutReason.REWARD_FAILED) for group in failed),
        *(LeftOutGroup(group.without_routing(), LeftOutReason.NO_SIGNAL) for group in replaced),
    )
    return SampledGroups(
        groups=(*chosen, *filling),
        dropped=len(failed),
        replaced=len(replaced),
        tokens=sum(len(answer.answer.tokens) for group in groups for answer in group.answers),
        left_out_groups=left_out_groups,
    )


def has_signal(rewards: Floats) -> Booleans:
    """Return the groups whose rewards differ; in all others every advantage is 0. [groups, members] -> [groups]"""
    differs: Booleans = np.ptp(rewards, axis=1) > 0
    return differs


def has_all_rewards(rewards: Floats) -> Booleans:
    """Return the groups with a reward for every answer; a failed reward is NaN. [groups, members] -> [groups]"""
    is_rewarded: Booleans = np.isfinite(rewards.sum(axis=1))
    return is_rewarded


def overlong_penalty(lengths: npt.NDArray[np.integer[Any]], max_new_tokens: int, settings: OverlongAnswers) -> Floats:
    """Return the addition to the reward of answers of these lengths: 0, then linear down to -penalty.

    With maxNewTokens 100, penaltyTokens 20 and penalty 1: 0 up to 80 tokens, -0.5 at 90, -1 at 100 (DAPO).
    """
    excess_tokens = np.clip(lengths - (max_new_tokens - settings.penalty_tokens), 0, settings.penalty_tokens)
    penalties: Floats = -settings.penalty * excess_tokens / settings.penalty_tokens
    return penalties
