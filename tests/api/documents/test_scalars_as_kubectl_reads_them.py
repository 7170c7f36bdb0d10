"""Bare words of YAML, against what kubectl makes of them: recorded, and asked again wherever kubectl is on PATH.

Recorded with kubectl 1.32 from one manifest whose spec was {words: [WORD, ...]}:
    kubectl annotate --local --filename - x=y --output json
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moejob_api.documents.scalars import NotFiniteError, resolve_scalar

Kubectl = Callable[[str], Any]

RECORDED: dict[str, Any] = {
    # numbers
    "1e-5": 1e-5,
    "1E5": 100000,
    "1e3": 1000,
    "8.0": 8,
    "8.": 8,
    ".5": 0.5,
    "-.5": -0.5,
    "+.5": 0.5,
    "1.5": 1.5,
    "-1.5e-3": -0.0015,
    "0": 0,
    "-0": 0,
    "-0.0": 0,
    "+5": 5,
    "-17": -17,
    "42": 42,
    "1_000": 1000,
    "1__0": 10,
    "1_": 1,
    "1_0.5": 10.5,
    "1e-400": 0,
    "1e20": 1e20,
    "1e21": 1e21,
    "123456789012345678901234567890": 1.2345678901234568e29,
    "9223372036854775807": 2**63 - 1,
    "9223372036854775808": float(2**63),
    "-9223372036854775808": -(2**63),
    "18446744073709551615": float(2**64),
    # other bases
    "0o17": 15,
    "0O17": 15,
    "0o_7": 7,
    "017": 15,
    "-017": -15,
    "00": 0,
    "09": 9,
    "0x1F": 31,
    "0X1f": 31,
    "-0x1F": -31,
    "0b101": 5,
    "-0b11": -3,
    "0b-1": -1,
    # no numbers
    "1e400": "1e400",
    "_1": "_1",
    "0o": "0o",
    "0x": "0x",
    "0xfg": "0xfg",
    "0b": "0b",
    "0b2": "0b2",
    "0xFFFFFFFFFFFFFFFFFF": "0xFFFFFFFFFFFFFFFFFF",
    "0x1p3": "0x1p3",
    "1d5": "1d5",
    "e5": "e5",
    ".e5": ".e5",
    "1e": "1e",
    "1e+": "1e+",
    "+1+1": "+1+1",
    "0.1.2": "0.1.2",
    "1,000": "1,000",
    ".": ".",
    "..": "..",
    "+": "+",
    "--": "--",
    "inf": "inf",
    "nan": "nan",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "8GB": "8GB",
    "1Gi": "1Gi",
    "500m": "500m",
    # times and sexagesimals
    "12:30": "12:30",
    "12:30:45": "12:30:45",
    "190:20:30": "190:20:30",
    "1:30.5": "1:30.5",
    "2020-01-01": "2020-01-01",
    "2020-1-1": "2020-1-1",
    "2020-01-01T00:00:00Z": "2020-01-01T00:00:00Z",
    # true, false and nothing
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON", "y", "Y"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF", "n", "N"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~"), None),
    "tRUE": "tRUE",
    "yEs": "yEs",
    "nULL": "nULL",
    "None": "None",
    "nil": "nil",
    # text
    "=": "=",
    "/": "/",
    "a#b": "a#b",
    "\\n": "\\n",
    "http://a:80/b?c=d": "http://a:80/b?c=d",
}


@pytest.mark.parametrize("word", RECORDED)
def test_a_word_is_read_as_kubectl_reads_it(word: str) -> None:
    value = resolve_scalar(word)
    assert (value, type(value)) == (RECORDED[word], type(RECORDED[word]))


@pytest.mark.parametrize("word", [".inf", "-.inf", "+.Inf", ".INF", ".nan", ".NaN"])
def test_what_kubectl_cannot_store_is_no_value(word: str) -> None:
    with pytest.raises(NotFiniteError):
        resolve_scalar(word)


def test_nothing_at_all_is_null() -> None:
    assert resolve_scalar("") is None


def test_the_kubectl_on_this_machine_still_reads_them_so(kubectl: Kubectl) -> None:
    read = kubectl("words:\n" + "".join(f"- {word}\n" for word in RECORDED))["words"]
    assert dict(zip(RECORDED, map(_as_stored, read), strict=True)) == RECORDED


def _as_stored(value: Any) -> Any:
    # kubectl prints a large float without a point, which Python then takes for an exact integer.
    is_large = isinstance(value, int) and not -(2**63) <= value < 2**63
    return float(value) if is_large else value
