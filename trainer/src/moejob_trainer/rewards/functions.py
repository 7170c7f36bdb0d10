"""Functions of the user's own, called as TRL calls them: lists of prompts and completions, and of every other field."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from moejob_trainer.rewards.completion import Completion, RewardFailed


def function(module: str, folder: str | None) -> Callable[..., Any]:
    """Return `package.module:function`, from a folder that is searched first."""
    name, separator, attribute = module.partition(":")
    if not separator:
        raise RewardFailed(f"{module} names no function; write package.module:function")
    if folder is not None:
        sys.path.insert(0, folder)
    found = getattr(importlib.import_module(name), attribute, None)
    if not callable(found):
        raise RewardFailed(f"module {name} has no function {attribute}")
    return found  # type: ignore[no-any-return]


def scores(call: Callable[..., Any], completions: Sequence[Completion]) -> list[float]:
    """Return a function's score of each completion: f(prompts, completions, **fields), sync or async."""
    names = sorted({name for completion in completions for name in completion.fields})
    fields = {name: [completion.fields.get(name) for completion in completions] for name in names}
    found = call(
        prompts=[completion.prompt for completion in completions],
        completions=[completion.text for completion in completions],
        **fields,
    )
    if inspect.isawaitable(found):
        found = asyncio.run(_awaited(found))
    values = list(found)
    if len(values) != len(completions):
        raise RewardFailed(f"it returned {len(values)} scores for {len(completions)} completions")
    return values


async def _awaited(found: Any) -> Any:
    return await found
