"""Rewards as users write them, good ones and bad ones."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


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


def last_words(
    prompts: Sequence[Sequence[Mapping[str, str]]],
    completions: Sequence[Sequence[Mapping[str, str]]],
    answer: Sequence[str],
    **_: object,
) -> list[float]:
    """The number of messages before a right answer."""
    return [
        float(len(prompt)) if completion[0]["content"] == right else 0.0
        for prompt, completion, right in zip(prompts, completions, answer, strict=True)
    ]


def prompt_length(prompts: Sequence[str], **_: object) -> list[int]:
    """Characters of the prompt."""
    return [len(prompt) for prompt in prompts]


def environment(completions: Sequence[str], **_: object) -> list[float]:
    """1 for each variable that is set."""
    return [float(completion in os.environ) for completion in completions]


LOOPS: set[asyncio.AbstractEventLoop] = set()


async def same_loop(completions: Sequence[str], **_: object) -> list[int]:
    """The event loops so far."""
    LOOPS.add(asyncio.get_running_loop())
    return [len(LOOPS)] * len(completions)


def meets_others(completions: Sequence[str], folder: Sequence[str], others: Sequence[int], **_: object) -> list[float]:
    """Return when as many processes are here."""
    here = Path(folder[0])
    (here / completions[0]).touch()
    while len(list(here.iterdir())) < others[0]:
        threading.Event().wait(0.05)
    return [1.0]
