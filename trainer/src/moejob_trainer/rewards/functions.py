"""Functions of the user's own, called as TRL calls them: lists of prompts and completions, and of every other field."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moejob_api.job.grpo import Reward
from moejob_trainer.rewards.completion import Completion, FailureKind, RewardFailed

_LAST_FRAMES = 4
_MOST_MESSAGE, _MOST_VALUE = 2000, 100


class RewardFunction:
    """A function of a module. Its coroutines share one event loop, so that its clients keep their connections."""

    def __init__(self, reward: Reward) -> None:
        self._call = load_function(reward.module or "", reward.module_path)
        self._is_conversational = reward.conversational
        self._runner: asyncio.Runner | None = None

    def score_batch(self, completions: Sequence[Completion]) -> list[float]:
        """Return the score of each completion: f(prompts, completions, **fields), sync or async."""
        names = sorted({name for completion in completions for name in completion.fields})
        fields = {name: [completion.fields.get(name) for completion in completions] for name in names}
        returned = self._call(
            **{
                **fields,
                "prompts": self._prompt_arguments(completions),
                "completions": self._completion_arguments(completions),
            }
        )
        if inspect.isawaitable(returned):
            returned = self._await_result(returned)
        return validate_scores(returned, len(completions))

    def _prompt_arguments(self, completions: Sequence[Completion]) -> list[Any]:
        if not self._is_conversational:
            return [completion.prompt for completion in completions]
        return [
            [{"role": "user", "content": completion.prompt}] if completion.messages is None else completion.messages
            for completion in completions
        ]

    def _completion_arguments(self, completions: Sequence[Completion]) -> list[Any]:
        if not self._is_conversational:
            return [completion.text for completion in completions]
        return [[{"role": "assistant", "content": completion.text}] for completion in completions]

    def _await_result(self, returned: Any) -> Any:
        async def wait_for_result() -> Any:
            return await returned

        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            return self._runner.run(wait_for_result())
        except BaseException:
            # An interrupted loop may hold half of a request, so the next call starts a new one.
            self._runner = None
            raise


def load_function(module: str, folder: str | None) -> Callable[..., Any]:
    """Return `package.module:function`, from a folder that is searched first."""
    name, separator, attribute = module.partition(":")
    if not separator:
        raise RewardFailed(FailureKind.IMPORT, f"{module} names no function; write package.module:function")
    if folder is not None:
        sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(name), attribute, None)
    # An import runs whatever the module says, and may even exit.
    except (Exception, SystemExit) as error:
        where = f"in modulePath {folder}" if folder else "in this Python; set modulePath, or install it"
        raise RewardFailed(FailureKind.IMPORT, f"{name} cannot be imported {where}: {describe_error(error)}") from error
    if not callable(function):
        raise RewardFailed(FailureKind.IMPORT, f"module {name} has no function {attribute}")
    return function  # type: ignore[no-any-return]


def validate_scores(returned: Any, count: int) -> list[float]:
    """Return scores as numbers; RewardFailed where they are something else."""
    if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__iter__"):
        raise RewardFailed(
            FailureKind.WRONG_TYPE, f"it returned {_shorten_value(returned)}, which is no list of scores"
        )
    values = list(returned)
    if len(values) != count:
        raise RewardFailed(FailureKind.WRONG_COUNT, f"it returned {len(values)} scores for {count} completions")
    return [_validate_score(value) for value in values]


def _validate_score(value: Any) -> float:
    try:
        score = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        kind = FailureKind.NOT_FINITE if isinstance(error, OverflowError) else FailureKind.WRONG_TYPE
        raise RewardFailed(kind, f"it returned {_shorten_value(value)}, which is no finite number") from error
    if isinstance(value, str | bytes | bytearray):
        raise RewardFailed(
            FailureKind.WRONG_TYPE, f"it returned {_shorten_value(value)}, which is text and no finite number"
        )
    if not math.isfinite(score):
        raise RewardFailed(FailureKind.NOT_FINITE, f"it returned {_shorten_value(value)}, which is no finite number")
    return score


def describe_error(error: BaseException) -> str:
    """Return an exception with the last frames of its traceback, ours left out."""
    own_folder = str(Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((own_folder, "<frozen importlib"))
        and not frame.filename.endswith("/importlib/__init__.py")
    ]
    places = "".join(
        f" [{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}]" for frame in frames[-_LAST_FRAMES:]
    )
    return f"{_error_message(error)}{places}"


def _error_message(error: BaseException) -> str:
    # Whatever __str__ of a user's exception does.
    try:
        text = str(error)
    except Exception:  # noqa: BLE001
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}"[:_MOST_MESSAGE]


def _shorten_value(value: object) -> str:
    # An integer of millions of digits, or whatever __repr__ of a user's object does.
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]}..."
