"""Rewards as users write them, good ones and bad ones."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import Sequence


def by_length(completions: Sequence[str], **_: object) -> list[int]:
    """Characters; what it prints must not hurt."""
    sys.stdout.write("scoring\n")
    return [len(completion) for completion in completions]


async def as_asked(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """The field `answer` of each prompt."""
    await asyncio.sleep(0)
    return [float(right == said) for right, said in zip(answer, completions, strict=True)]


def raises_at_bad(completions: Sequence[str], **_: object) -> list[float]:
    """Raises for a whole batch in which there is a bad one."""
    if "bad" in completions:
        raise ValueError("a bad one")
    return [1.0] * len(completions)


def gives_nan(completions: Sequence[str], **_: object) -> list[float]:
    """No number."""
    return [math.nan] * len(completions)


def hangs_at_bad(completions: Sequence[str], **_: object) -> list[float]:
    """Never returns for a batch in which there is a bad one."""
    if "bad" in completions:
        threading.Event().wait()
    return [1.0] * len(completions)


def dies_at_bad(completions: Sequence[str], **_: object) -> list[float]:
    """Takes its process along."""
    if "bad" in completions:
        os._exit(3)
    return [1.0] * len(completions)


def one_too_few(completions: Sequence[str], **_: object) -> list[float]:
    """Forgets one."""
    return [1.0] * (len(completions) - 1)
