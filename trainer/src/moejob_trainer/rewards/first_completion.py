"""A made-up answer to the first prompt: it shows a reward that cannot work before engines start and generate."""

from __future__ import annotations

from moejob_api.job.grpo import Grpo, RewardFailure
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.rewards.completion import FINAL_FAILURES, Completion, FailureKind, RewardFailed

# Failures that every answer would have. An exception is not among them: the made-up answer may be its cause.
_CERTAIN_FAILURES = frozenset({*FINAL_FAILURES, FailureKind.RECORD, FailureKind.WRONG_TYPE, FailureKind.WRONG_COUNT})


def made_up_completion(grpo: Grpo, prompt: Prompt) -> Completion:
    """Return the reference as the answer to a prompt: the model has not written one yet."""
    reference_field = next(reward.reference for reward in grpo.rewards)
    text = str(prompt.fields.get(reference_field, ""))
    return Completion(prompt.text, text, 1, grpo.max_new_tokens, prompt.fields, prompt.messages)


def tolerated_failures(failures: dict[str, RewardFailed], policy: RewardFailure) -> list[str]:
    """Return a line for each failure that may spare other answers; raise for a failure that every answer has."""
    lines = []
    for name, failure in failures.items():
        text = f"reward {name} failed for a made-up answer to the first prompt ({failure.kind}): {failure}"
        if failure.kind is FailureKind.AWAY:
            raise TransientFailure(text)
        if failure.kind in _CERTAIN_FAILURES:
            raise BadConfiguration(text)
        if policy is RewardFailure.STOP:
            raise BadConfiguration(f"{text}; grpo.rewardFailure is Stop")
        lines.append(f"{text}; groups with such answers will be left out")
    return lines
