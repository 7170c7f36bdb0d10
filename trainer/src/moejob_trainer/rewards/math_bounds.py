"""Bounds on the mathematics of an answer, before anything computes with it: `9**9**9` has 370 million digits.

SymPy evaluates numbers while it parses, at times in code that takes no interruption, so that numbers out of bounds are
taken out of the text first.
"""

from __future__ import annotations

import math
import re

# Digits of one number, and of the exponent that a power may have: 10^10000 is more than any reference.
MOST_DIGITS, MOST_EXPONENT = 1000, 10_000
# Of brackets inside brackets. Parsers of LaTeX take time that doubles with each.
MOST_DEPTH = 24
_LARGEST_FACTORIAL = 1000

_NUMBER = r"\d[\d,._]*"
_POWER = r"(?:\*\*|\^)"
_TOWER = re.compile(rf"{_NUMBER}[\s)}}]*(?:{_POWER}[\s{{(\\]*[-+]?\s*{_NUMBER}[\s)}}]*)+")
_EXPONENT = re.compile(rf"{_POWER}[\s{{(\\]*[-+]?\s*({_NUMBER})")
_DIGITS = re.compile(rf"[\d,._]{{{MOST_DIGITS},}}")
_SCIENTIFIC = re.compile(rf"{_NUMBER}[eE][-+]?\d{{5,}}")
_FACTORIAL = re.compile(r"(\d+)[\s)}]*!(?:[\s)}]*!)*")
_NOTHING = "?"


def bounded_mathematics(text: str) -> str | None:
    """Return the text without numbers that are out of bounds; None where it is nested too deeply."""
    if _bracket_depth(text) > MOST_DEPTH:
        return None
    text = _DIGITS.sub(_NOTHING, text)
    text = _SCIENTIFIC.sub(_NOTHING, text)
    text = _FACTORIAL.sub(lambda match: _NOTHING if _is_large_factorial(match) else match[0], text)
    text = _TOWER.sub(lambda match: _NOTHING if _is_large_tower(match[0]) else match[0], text)
    return _EXPONENT.sub(lambda match: _NOTHING if _number_value(match[1]) > MOST_EXPONENT else match[0], text)


def _bracket_depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _is_large_factorial(match: re.Match[str]) -> bool:
    return match[0].count("!") > 1 or _number_value(match[1]) > _LARGEST_FACTORIAL


def _is_large_tower(text: str) -> bool:
    """Return whether a ** b ** c has more digits than MOST_DIGITS, or an exponent above MOST_EXPONENT on its way."""
    values = [_number_value(number) for number in re.findall(_NUMBER, text)]
    exponent = values.pop()
    while values:
        base = values.pop()
        if exponent > MOST_EXPONENT or exponent * math.log10(max(base, 1)) > MOST_DIGITS:
            return True
        exponent = base**exponent if exponent * math.log10(max(base, 1)) < math.log10(MOST_EXPONENT) + 1 else math.inf
    return False


def _number_value(number: str) -> float:
    try:
        return float(re.sub(r"[,_]", "", number).rstrip("."))
    except (ValueError, OverflowError):
        return math.inf
