"""The value of a bare word of YAML, as kubectl reads it; knows nothing of jobs.

kubectl reads YAML with the second version of Go's yaml library and writes it as JSON. Neither YAML 1.1 nor 1.2 says
quite what that does, and PyYAML does something else again: `1e-5`, `0o17` and `1_000` are numbers to kubectl, `y` is
true, times and sexagesimals are text, and a whole number stays whole when it is written 8.0 or 1e3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

Scalar = str | int | float | bool | None


class NotFiniteError(ValueError):
    """Infinity or not-a-number, for which JSON, and so Kubernetes, has no word."""


def _case_forms(*words: str) -> frozenset[str]:
    return frozenset(form for word in words for form in (word, word.capitalize(), word.upper()))


_WORDS: Mapping[str, Scalar] = {
    **dict.fromkeys(_case_forms("y", "yes", "true", "on"), True),
    **dict.fromkeys(_case_forms("n", "no", "false", "off"), False),
    **dict.fromkeys({"", "~"} | _case_forms("null"), None),
}
_NOT_FINITE = frozenset(
    {".nan", ".NaN", ".NAN"} | {f"{sign}{word}" for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")}
)
_WHOLE_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<bin>[01]+)|0[oO]?(?P<oct>[0-7]+)|(?P<dec>0|[1-9][0-9]*))"
)
# The library's own way with 0b lets a sign stand behind the prefix.
_SIGNED_BINARY = re.compile(r"0b(?P<bin>[-+][01]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LONGEST_WHOLE = 70  # 0b and 64 digits, with room: what is longer fits no integer in any base
_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
_INT64 = range(-(2**63), 2**63)
_UINT64_END = 2**64


def resolve_scalar(text: str) -> Scalar:
    """The value of a plain scalar; raises NotFiniteError for infinity and not-a-number."""
    if text in _WORDS:
        return _WORDS[text]
    if text in _NOT_FINITE:
        raise NotFiniteError(text)
    # Underscores are dropped from what starts like a number, not from what starts with a point.
    digits = text.replace("_", "") if text[0] in "+-0123456789" else text
    whole_number = _parse_whole_number(digits)
    if whole_number is not None:
        return narrow_number(float(whole_number)) if whole_number not in _INT64 else whole_number
    if not _FLOAT.fullmatch(digits):
        return text
    number = float(digits)
    # The library takes a number too large for it to be text.
    return narrow_number(number) if math.isfinite(number) else text


def narrow_number(number: float) -> int | float:
    """A number as it comes out of JSON between kubectl and the API server: whole when it is a whole int64."""
    return int(number) if number.is_integer() and int(number) in _INT64 else number


def _parse_whole_number(digits: str) -> int | None:
    if len(digits) > _LONGEST_WHOLE:
        return None
    digits_match = _WHOLE_NUMBER.fullmatch(digits) or _SIGNED_BINARY.fullmatch(digits)
    if digits_match is None or digits_match.lastgroup is None:
        return None
    number = int(digits_match[digits_match.lastgroup], _BASES[digits_match.lastgroup])
    sign = digits_match.groupdict().get("sign")
    number = -number if sign == "-" else number
    # Only what has no sign is tried as an unsigned integer too.
    return number if number in _INT64 or (not sign and number < _UINT64_END) else None
