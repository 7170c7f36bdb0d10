"""Widespread shapes of records, turned into the records of a format: Alpaca, ShareGPT, GSM8K.

Pure functions of one record; a message names its place. OpenAI's messages are what Chat reads as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from moejob_api.job.model import DataFormat, DataShape
from moejob_trainer.data.conversations import require_field, require_text
from moejob_trainer.data.records import Record
from moejob_trainer.errors import BadData

_ANSWER = "####"
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def convert_shape(record: Record, shape: DataShape, target_format: DataFormat) -> Record:
    """Return a record of a shape as one of the format; fields that the shape does not know stay."""
    match shape:
        case DataShape.ALPACA:
            return _question_record(record, target_format, _alpaca_prompt(record), require_text(record, "output"))
        case DataShape.GSM8K:
            return _convert_gsm8k(record, target_format)
        case DataShape.SHARE_GPT:
            return _replace_fields(record, {"messages": _sharegpt_messages(record)})
        case _:
            assert_never(shape)


def _alpaca_prompt(record: Record) -> str:
    instruction, beside = require_text(record, "instruction"), record.fields.get("input") or ""
    if not isinstance(beside, str):
        raise BadData(f"{record.place}: input is a {type(beside).__name__}; expected text")
    return f"{instruction}\n\n{beside}" if beside else instruction


def _convert_gsm8k(record: Record, target_format: DataFormat) -> Record:
    question, solution = require_text(record, "question"), require_text(record, "answer")
    if target_format is not DataFormat.PROMPTS:
        return _question_record(record, target_format, question, solution)
    _, mark, number = solution.rpartition(_ANSWER)
    if not mark or not number.strip():
        raise BadData(f"{record.place}: the answer has no {_ANSWER} before its number; leave out shape GSM8K")
    # Rewards compare with the number alone; 1,000 is written as numbers are.
    return _replace_fields(
        _question_record(record, target_format, question, number.strip().replace(",", "")), {"solution": solution}
    )


def _question_record(record: Record, target_format: DataFormat, prompt: str, answer: str) -> Record:
    user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
    match target_format:
        case DataFormat.CHAT:
            system = record.fields.get("system")
            first = [{"role": "system", "content": system}] if system else []
            return _replace_fields(record, {"messages": [*first, user, assistant]})
        case DataFormat.PROMPT_COMPLETION:
            return _replace_fields(record, {"prompt": prompt, "completion": answer})
        case DataFormat.PROMPTS:
            return _replace_fields(record, {"prompt": [user], "answer": answer})
        case _:
            raise BadData(f"{record.place}: records of this shape cannot become format {target_format}")


def _sharegpt_messages(record: Record) -> list[Mapping[str, object]]:
    turns = require_field(record, "conversations")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise BadData(f"{record.place}: conversations is no list; expected objects with from and value")
    return [_sharegpt_message(turn, f"{record.place}, turn {number}") for number, turn in enumerate(turns, start=1)]


def _sharegpt_message(turn: object, place: str) -> Mapping[str, object]:
    sender = turn.get("from") if isinstance(turn, Mapping) else None
    if not isinstance(turn, Mapping) or sender not in _ROLES or "value" not in turn:
        raise BadData(f"{place} is from {sender!r}; expected an object with value, and from one of {', '.join(_ROLES)}")
    weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
    return {"role": _ROLES[sender], "content": turn["value"], **weight}


def _replace_fields(record: Record, fields: Mapping[str, object]) -> Record:
    return replace(record, fields={**record.fields, **fields})
