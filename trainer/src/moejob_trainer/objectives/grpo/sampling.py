"""Groups of answers with their rewards, which rank 0 samples while the other ranks wait.

All requests of a step are sent at once, and each answer is scored as soon as it arrives. Knows the interface of a
generator and no engine behind it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from moejob_api.job.grpo import Grpo
from moejob_trainer.data.prompt_loader import NumberedPrompt, PromptLoader
from moejob_trainer.data.shuffling import mixed
from moejob_trainer.objectives.grpo.groups import has_signal, is_complete, overlong_penalty
from moejob_trainer.rewards.completion import Completion
from moejob_trainer.rewards.scorer import Score, Scorer
from moejob_trainer.rollouts.interface import Answer, Generator, Request, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class ScoredAnswer:
    """An answer with its text and its reward."""

    answer: Answer
    text: str
    score: Score
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
        kept = (replace(each, answer=replace(each.answer, routing=None)) for each in self.answers)
        return replace(self, answers=tuple(kept))


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
class Sampled:
    """The groups of a step, and the groups that it leaves out, with the reasons."""

    groups: tuple[AnswerGroup, ...]
    # Groups in which an answer has no reward.
    dropped: int = 0
    # Groups that dynamic sampling replaced because they had no signal.
    replaced: int = 0
    # Tokens of all answers, also of those in groups that are left out.
    tokens: int = 0
    # Seconds in which all answers had arrived and rewards were still computed.
    reward_seconds: float = 0.0
    left_out: tuple[LeftOutGroup, ...] = ()

    def without_routing(self) -> Sampled:
        """Return the same answers without the experts of their tokens."""
        return replace(self, groups=tuple(group.without_routing() for group in self.groups))


@dataclass(frozen=True, slots=True)
class Asker:
    """Samples answers from a generator and scores them. `decode` makes the text of an answer, without its end."""

    generator: Generator
    scorer: Scorer
    decode: Callable[[Sequence[int]], str]
    seed: int
    # The event loop in which the scorer was started; None: it has not been started.
    runner: asyncio.Runner | None = None

    async def group(self, prompt: NumberedPrompt, members: int, sampling: Sampling, grpo: Grpo) -> AnswerGroup:
        """Return the answers of all members to a prompt; equal seeds and weights give equal answers."""
        asked = (self._answered(prompt, member, sampling, grpo) for member in range(members))
        return AnswerGroup(prompt, tuple(await asyncio.gather(*asked)))

    async def _answered(self, prompt: NumberedPrompt, member: int, sampling: Sampling, grpo: Grpo) -> ScoredAnswer:
        tokens = np.asarray(prompt.prompt.tokens, np.int32)
        request = Request(prompt.number, member, tokens, mixed(self.seed, prompt.number, member) % 2**31)
        answer = await self.generator.generate(request, sampling)
        answered_at = time.monotonic()
        text = self.decode([token for token in answer.tokens.tolist() if token not in sampling.stop_tokens])
        completion = Completion(
            *(prompt.prompt.text, text, len(answer.tokens), sampling.max_new_tokens),
            *(prompt.prompt.fields, prompt.prompt.messages),
        )
        score = await self.scorer.score(completion)
        penalty = overlong_penalty(np.array([len(answer.tokens)]), sampling.max_new_tokens, grpo.overlong)
        return ScoredAnswer(answer, text, score, score.total + float(penalty[0]), answered_at)


async def sample(asker: Asker, prompts: PromptLoader, grpo: Grpo, sampling: Sampling) -> Sampled:
    """Return the groups of a step.

    With dynamic sampling, groups without signal are replaced until promptsPerStep have one or overSampling is reached;
    then those without fill the step. A prompt is drawn only when it is sent: no drawn prompt is thrown away.
    """
    most = grpo.prompts_per_step
    if grpo.dynamic_sampling is not None:
        most = math.ceil(grpo.dynamic_sampling.over_sampling * grpo.prompts_per_step)
    kept: list[AnswerGroup] = []
    silent: list[AnswerGroup] = []
    failed: list[AnswerGroup] = []
    asked = tokens = 0
    reward_seconds = 0.0
    while len(kept) < grpo.prompts_per_step and asked < most:
        drawn = prompts.next_prompts(min(grpo.prompts_per_step - len(kept), most - asked))
        asked += len(drawn)
        groups = await asyncio.gather(*(asker.group(each, grpo.group_size, sampling, grpo) for each in drawn))
        every = [answer for group in groups for answer in group.answers]
        tokens += sum(len(answer.answer.tokens) for answer in every)
        reward_seconds += time.monotonic() - max(answer.answered_at for answer in every)
        for group in groups:
            rewards = np.array([group.rewards])
            if not is_complete(rewards)[0]:
                failed.append(group)
            elif grpo.dynamic_sampling is None or has_signal(rewards)[0]:
                kept.append(group)
            else:
                silent.append(group)
    room = grpo.prompts_per_step - len(kept)
    fill, replaced = silent[:room], silent[room:]
    left_out = (
        *(LeftOutGroup(group.without_routing(), LeftOutReason.REWARD_FAILED) for group in failed),
        *(LeftOutGroup(group.without_routing(), LeftOutReason.NO_SIGNAL) for group in replaced),
    )
    return Sampled((*kept, *fill), len(failed), len(replaced), tokens, reward_seconds, left_out)
