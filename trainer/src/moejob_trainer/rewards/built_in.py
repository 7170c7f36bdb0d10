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

ScoreFunction = Callable[[Completion], float]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


def built_in_score(reward: Reward) -> ScoreFunction:
    """Return the function of a built-in reward."""
    match reward.name:
        case BuiltInReward.EXACT_MATCH:
            return partial(_score_exact_match, reference=reward.reference)
        case BuiltInReward.NUMERIC:
            return partial(_score_numeric, reference=reward.reference)
        case BuiltInReward.MATH:
            return _build_math_score(reward.reference)
        case BuiltInReward.FORMAT:
            return partial(_score_format, pattern=_compile_pattern(reward.pattern or ""))
        case BuiltInReward.LENGTH:
            return _score_length
        case None:
            raise ValueError("a reward without a name is not built in")
        case _:
            assert_never(reward.name)


def _score_exact_match(completion: Completion, reference: str) -> float:
    return float(completion.text.strip() == _reference_answer(completion, reference).strip())


def _score_numeric(completion: Completion, reference: str) -> float:
    """The last number counts, as in the answers of GSM8K: `... #### 1,200` is 1200."""
    expected_number = _last_number(_reference_answer(completion, reference))
    if expected_number is None:
        expected = _reference_answer(completion, reference)
        raise RewardFailed(FailureKind.RECORD, f"field {reference} of the prompt, {expected!r}, has no number")
    return float(_last_number(completion.text) == expected_number)


def _build_math_score(reference: str) -> ScoreFunction:
    # Half a second of imports, which only this reward needs.
    from math_verify import parse, verify  # noqa: PLC0415

    # It warns at each start that time is not limited, which it is.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def verify_answer(expected: list[Any], text: str) -> float:
        # An answer that cannot be parsed is wrong, and the reward has not failed. Time is limited from outside.
        return float(verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None))

    def score_completion(completion: Completion) -> float:
        expected = _reference_answer(completion, reference)
        parsed_reference = parse(expected, parsing_timeout=None)
        if not parsed_reference:
            raise RewardFailed(FailureKind.RECORD, f"field {reference} of the prompt, {expected!r}, is no mathematics")
        text = bounded_mathematics(completion.text)
        return 0.0 if text is None else verify_answer(parsed_reference, text)

    # Tables of the parsers are built at the first use, and must not be charged to the first answer.
    verify_answer(parse("$1$", parsing_timeout=None), r"$\frac{1}{1}$")
    return score_completion


def _score_format(completion: Completion, pattern: re.Pattern[str]) -> float:
    return float(pattern.fullmatch(completion.text) is not None)


def _score_length(completion: Completion) -> float:
    return completion.tokens / completion.max_new_tokens


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        message = f"the pattern {pattern!r} is no regular expression: {error}"
        raise RewardFailed(FailureKind.IMPORT, message) from error


def _reference_answer(completion: Completion, name: str) -> str:
    if name not in completion.fields:
        field_names = ", ".join(sorted(completion.fields)) or "none"
        message = f"the record of the prompt has no field {name} (it has {field_names}); set reference"
        raise RewardFailed(FailureKind.RECORD, message)
    return str(completion.fields[name])


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    try:
        return Decimal(numbers[-1].replace(",", ""))
    except InvalidOperation:
        return None
