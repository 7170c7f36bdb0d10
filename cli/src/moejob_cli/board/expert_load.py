"""The load of experts as the page draws it: each expert's choices over the mean of its layer, in a byte."""

from __future__ import annotations

import base64
import binascii
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from math import exp, log
from typing import Any

from moejob_cli.board.step_columns import parse_lines

# Columns of the map; a wide screen has few more pixels for each.
_MOST_STEPS = 240
# A model of 100 layers with 1,024 experts.
_MOST_COUNTS = 1 << 17
_MEAN_BYTE = 64


def read_expert_load(lines: Sequence[bytes]) -> dict[str, Any]:
    """Return the steps of the log, the last line of each, with the load of every expert and the use of every layer."""
    rows: dict[int, tuple[list[int], array[int]]] = {}
    for row in parse_lines(lines):
        step, layers, counts = row.get("step"), row.get("layers"), _unpack_counts(row)
        if isinstance(step, int) and counts is not None and isinstance(layers, list):
            for later in [number for number in rows if number >= step]:
                del rows[later]
            rows[step] = (layers, counts)
    newest = rows[max(rows)] if rows else ([], array("I"))
    shape = (newest[0], len(newest[1]))
    steps = [step for step, (layers, counts) in rows.items() if (layers, len(counts)) == shape]
    steps = [
        steps[number * len(steps) // min(len(steps), _MOST_STEPS)] for number in range(min(len(steps), _MOST_STEPS))
    ]
    experts = len(newest[1]) // max(1, len(newest[0]))
    by_layer = [[rows[step][1][first : first + experts] for first in range(0, shape[1], experts)] for step in steps]
    loads = bytes(load for layers in by_layer for counts in layers for load in _load_bytes(counts))
    return {
        "steps": steps,
        "layers": newest[0],
        "experts": experts,
        "use": [[round(expert_use(counts), 4) for counts in layers] for layers in by_layer],
        "loads": base64.b64encode(loads).decode(),
    }


def expert_use(counts: Iterable[int]) -> float:
    """Return exp(entropy) / experts: 1 when all have equally much, 1 / experts when one has all."""
    numbers = list(counts)
    total = sum(numbers)
    if not total:
        return 0.0
    return exp(-sum(count / total * log(count / total) for count in numbers if count)) / len(numbers)


def _load_bytes(counts: array[int]) -> list[int]:
    mean = sum(counts) / len(counts) or 1.0
    # An expert that got a token is not drawn as idle.
    return [min(255, max(1, round(count / mean * _MEAN_BYTE))) if count else 0 for count in counts]


def _unpack_counts(row: dict[str, Any]) -> array[int] | None:
    layers, experts = row.get("layers"), row.get("experts")
    if not isinstance(layers, list) or not isinstance(experts, int) or not 0 < len(layers) * experts <= _MOST_COUNTS:
        return None
    counts, size = array("I"), len(layers) * experts * 4
    try:
        packed = base64.b64decode(row["choices"], validate=True)
        # Few bytes may stand for a terabyte.
        content = zlib.decompressobj().decompress(packed, size + 1)
    except (KeyError, TypeError, binascii.Error, zlib.error, ValueError):
        return None
    if len(content) != size:
        return None
    counts.frombytes(content)
    if sys.byteorder == "big":
        counts.byteswap()
    return counts
