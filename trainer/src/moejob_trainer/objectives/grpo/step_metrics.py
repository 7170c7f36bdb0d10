"""Numbers of a step's answers for the step log, and the lines of samples/step-N.jsonl.

An answer of sampling is a rollout of the loss, in one row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moejob_trainer.objectives.grpo.sampling import AnswerGroup, SampledGroups, has_signal
from moejob_trainer.rollouts.interface import FinishReason


def reward_metrics(sampled: SampledGroups, names: Sequence[str]) -> dict[str, float]:
    """Return the numbers of a step's rewards and answers."""
    rewards = np.concatenate([group.rewards for group in sampled.groups])
    answers = [answer for group in sampled.groups for answer in group.answers]
    lengths = np.array([len(answer.answer.tokens) for answer in answers])
    by_name = {f"reward/{name}": float(np.mean([answer.score.parts[name] for answer in answers])) for name in names}
    return {
        "reward": float(rewards.mean()),
        "rewardStd": float(rewards.std()),
        **by_name,
        "groups": float(len(sampled.groups)),
        # A group at a time: they may have different numbers of rollouts.
        "groupsWithoutSignal": float(sum(not has_signal(np.array([group.rewards]))[0] for group in sampled.groups)),
        "groupsDropped": float(sampled.dropped),
        "groupsReplaced": float(sampled.replaced),
        "generatedTokens": float(sampled.tokens),
        "rewardSeconds": round(sampled.reward_seconds, 6),
        "answerTokens": float(lengths.sum()),
        "answerLengthMean": float(lengths.mean()),
        "answerLengthMaximum": float(lengths.max()),
        "truncated": float(np.mean([answer.answer.finish_reason is FinishReason.LENGTH for answer in answers])),
    }


def version_metrics(groups: Sequence[AnswerGroup], version: int) -> dict[str, float]:
    """Return the published version of the weights, and how many versions older tokens are: most, and in the mean."""
    versions = np.concatenate([answer.answer.versions for group in groups for answer in group.answers])
    ages = version - versions
    return {"version": float(version), "staleness": float(ages.max()), "stalenessMean": float(ages.mean())}


def queue_metrics(sampled: SampledGroups) -> dict[str, float]:
    """Return the groups that run ahead of the step, that it waited for, and that were asked for again."""
    return {
        "groupsPending": float(sampled.pending),
        "groupsAwaited": float(sampled.awaited),
        "groupsAskedAgain": float(sampled.asked_again),
    }


def evaluation_metrics(groups: Sequence[AnswerGroup], names: Mapping[str, float]) -> dict[str, float]:
    """Return mean@k, the mean reward of k rollouts, and pass@k, the share of prompts with a right one among k.

    An answer is right when every reward that counts for it (a positive weight in `names`) is at least 1. A prompt with
    a failed reward counts in neither.
    """
    complete_groups = [group for group in groups if np.isfinite(group.rewards).all()]
    if not complete_groups:
        return {"evalFailed": float(len(groups))}
    k = len(complete_groups[0].answers)
    counted_names = [name for name, weight in names.items() if weight > 0]
    has_right_answer = [
        any(all(answer.score.parts[name] >= 1 for name in counted_names) for answer in group.answers)
        for group in complete_groups
    ]
    return {
        f"evalMean@{k}": float(np.mean([group.rewards for group in complete_groups])),
        f"evalPass@{k}": float(np.mean(has_right_answer)),
        "evalFailed": float(len(groups) - len(complete_groups)),
    }


def sample_lines(sampled: SampledGroups, advantages: Sequence[float], step: int, most_lines: int) -> Iterator[str]:
    """Yield a JSON line for each rollout, up to `most_lines`; `step` as in the step log."""
    scored_answers = [(group, answer) for group in sampled.groups for answer in group.answers]
    for (group, answer), advantage in list(zip(scored_answers, advantages, strict=True))[:most_lines]:
        line: dict[str, Any] = {
            "step": step,
            "group": group.prompt.number,
            "member": answer.answer.request.member,
            "prompt": group.prompt.prompt.text,
            "answer": answer.text,
            "finishReason": answer.answer.finish_reason,
            "reward": answer.reward,
            "rewards": dict(answer.score.parts),
            "advantage": advantage,
            # The newest version of the answer's tokens; staleness in the step log counts from the oldest.
            "version": int(answer.answer.versions.max()),
        }
        yield json.dumps(line, ensure_ascii=False)
