"""The rewards that come with the trainer: pure functions of one completion."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, assert_never

from moejob_api.job.grpo import BuiltInReward, Reward
from moejob_trainer.rewards.completion import Completion, FailureKind, RewardFailed
from moejob_trainer.rewards.math_bounds import bounded_mathematics

Score = Callable[[Completion], float]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


def built_in(reward: Reward) -> Score:
    """Return the function of a built-in reward."""
    match reward.name:
        case BuiltInReward.EXACT_MATCH:
            return partial(_exact_match, reference=reward.reference)
        case BuiltInReward.NUMERIC:
            return partial(_numeric, reference=reward.reference)
        case BuiltInReward.MATH:
            return _math(reward.reference)
        case BuiltInReward.FORMAT:
            return partial(_format, pattern=_compiled(reward.pattern or ""))
        case BuiltInReward.LENGTH:
            return _length
        case None:
            raise ValueError("a reward without a name is not built in")
        case _:
            assert_never(reward.name)


def _exact_match(completion: Completion, reference: str) -> float:
    return float(completion.text.strip() == _reference(completion, reference).strip())


def _numeric(completion: Completion, reference: str) -> float:
    """The last number counts, as in the answers of GSM8K: `... #### 1,200` is 1200."""
    right = _last_number(_reference(completion, reference))
    if right is None:
        expected = _reference(completion, reference)
        raise RewardFailed(FailureKind.RECORD, f"field {reference} of the prompt, {expected!r}, has no number")
    return float(_last_number(completion.text) == right)


def _math(reference: str) -> Score:
    # Half a second of imports, which only this reward needs.
    from math_verify import parse, verify  # noqa: PLC0415

    # It warns at each start that time is not limited, which it is.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def verified(right: list[Any], text: str) -> float:
        # An answer that cannot be parsed is wrong, and the reward has not failed. Time is limited from outside.
        return float(verify(right, parse(text, parsing_timeout=None), timeout_seconds=None))

    def score(completion: Completion) -> float:
        expected = _reference(completion, reference)
        right = parse(expected, parsing_timeout=None)
        if not right:
            raise RewardFailed(FailureKind.RECORD, f"field {reference} of the prompt, {expected!r}, is no mathematics")
        text = bounded_mathematics(completion.text)
        return 0.0 if text is None else verified(right, text)

    # Tables of the parsers are built at the first use, and must not be charged to the first answer.
    verified(parse("$1$", parsing_timeout=None), r"$\frac{1}{1}$")
    return score


def _format(completion: Completion, pattern: re.Pattern[str]) -> float:
    return float(pattern.fullmatch(completion.text) is not None)


def _length(completion: Completion) -> float:
    return completion.tokens / completion.max_new_tokens


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        message = f"the pattern {pattern!r} is no regular expression: {error}"
        raise RewardFailed(FailureKind.IMPORT, message) from error


def _reference(completion: Completion, name: str) -> str:
    if name not in completion.fields:
        known = ", ".join(sorted(completion.fields)) or "none"
        message = f"the record of the prompt has no field {name} (it has {known}); set reference"
        raise RewardFailed(FailureKind.RECORD, message)
    return str(completion.fields[name])


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None
