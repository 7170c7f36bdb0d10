"""Answers that cost a reward more than the model that wrote them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from moejob_api.job.grpo import BuiltInReward, Reward, RewardFailure
from moejob_trainer.rewards.completion import Completion
from moejob_trainer.rewards.math_bounds import bounded_mathematics
from moejob_trainer.rewards.scorer import Scorer

HOSTILE = {
    "tower": "$9**9**9**9$",
    "tower of LaTeX": "$9^{9^{9^{9}}}$",
    "boxed tower": r"\boxed{9^{9^{9}}}",
    "large exponent": "$2^{10000000000}$",
    "exponent beyond floats": "$1e999999999999$",
    "a million digits": "$" + "9" * 10**6 + "$",
    "a million digits with commas": "$" + "999," * 10**6 + "9$",
    "factorial": "$99999999!$",
    "factorials of factorials": "$((9!)!)!$",
    "nested fractions": "$" + r"\frac{1}{" * 500 + "1" + "}" * 500 + "$",
    "nested roots": "$" + r"\sqrt{" * 500 + "2" + "}" * 500 + "$",
    "nested brackets": "$" + "(" * 10_000 + "1" + ")" * 10_000 + "$",
    "open brackets": "$" + "{" * 10_000 + "$",
    "binomial": r"$\binom{100000000}{50000000}$",
    "long sum": "$" + "+".join(["1/3"] * 20_000) + "$",
    "long product": "$" + r"\cdot".join(f"x_{n}" for n in range(3000)) + "$",
    "expanded power": "$(a+b+c+d+e)^{200}$",
    "integral": r"$\int_0^1 \int_0^1 e^{x^{y^{x}}} dx dy$",
    "many boxes": r"\boxed{1}" * 20_000,
    "many dollars": "$" * 100_000,
    "backslashes": "\\" * 100_000,
    "spaces": " " * 10**6,
    "null": "\0" * 1000,
    "surrogate": "$\ud800$",
    "matrix": r"$\begin{pmatrix}" + "&".join("1" * 1000) + r"\end{pmatrix}$",
    "code": "$__import__('os').system('touch /tmp/hostile')$",
}


def _scored(reward: dict[str, Any], texts: dict[str, str], answer: str) -> tuple[dict[str, float], Scorer]:
    async def scored() -> tuple[dict[str, float], Scorer]:
        scorer = Scorer([Reward.model_validate(reward)], RewardFailure.DROP_GROUP)
        async with asyncio.timeout(280), scorer:
            completions = [Completion("?", text, 1, 1, {"answer": answer}) for text in texts.values()]
            values = await asyncio.gather(*map(scorer.score_completion, completions))
            return dict(zip(texts, (value.total for value in values), strict=True)), scorer

    return asyncio.run(scored())


def test_hostile_answers_are_wrong_or_fail_and_hold_no_other() -> None:
    right = {f"right {number}": r"so it is $\frac{2}{4}$" for number in range(4)}
    values, _ = _scored({"name": BuiltInReward.MATH, "timeoutSeconds": 60}, HOSTILE | right, "$0.5$")
    assert all(values[name] == 1 for name in right)
    assert all(math.isnan(values[name]) or values[name] == 0 for name in HOSTILE)


@pytest.mark.parametrize(
    "text", ["2^{3^{2}}", "10^{100}", "x^{2}", "5!", "1.5e-3", "2**10", r"\frac{1}{\sqrt{2}}", "1,234,567.5", "7^{-2}"]
)
def test_mathematics_of_people_is_left_as_it_is(text: str) -> None:
    assert bounded_mathematics(f"hence ${text}$") == f"hence ${text}$"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("9**9**9**9", "?"),
        ("2^{10001}", "?"),
        ("(7^9)^9^9", "(?"),
        ("1e99999", "?"),
        ("3!!", "?"),
        ("((9!)!)!", "((?"),
        ("1001!", "?"),
        ("1" * 1001, "?"),
        ("x^{20000}", "x?}"),
    ],
)
def test_numbers_out_of_bounds_are_taken_out(text: str, rest: str) -> None:
    assert bounded_mathematics(text) == rest


def test_deep_nesting_is_not_parsed() -> None:
    assert bounded_mathematics("(" * 25) is None
    assert bounded_mathematics("(" * 24) is not None
