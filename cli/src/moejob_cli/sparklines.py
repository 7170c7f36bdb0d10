"""Curves in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

_BARS = "▁▂▃▄▅▆▇█"


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a row of at most `width` bars; each bar is the mean of its share."""
    shown = [value for value in values if isfinite(value)]
    if not shown:
        return ""
    count = min(width, len(shown))
    shares = [shown[i * len(shown) // count : (i + 1) * len(shown) // count] for i in range(count)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
