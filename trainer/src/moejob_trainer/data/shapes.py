"""Widespread shapes of records, turned into the records of a format: Alpaca, ShareGPT, GSM8K.

Pure functions of one record; a message names its place. OpenAI's messages are what Chat reads as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from moejob_api.job.model import DataFormat, DataShape
from moejob_trainer.data.conversations import field, text
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


def shaped(record: Record, shape: DataShape, wanted: DataFormat) -> Record:
    """Return a record of a shape as one of the format; fields that the shape does not know stay."""
    match shape:
        case DataShape.ALPACA:
            return _asked(record, wanted, _instruction(record), text(record, "output"))
        case DataShape.GSM8K:
            return _gsm8k(record, wanted)
        case DataShape.SHARE_GPT:
            return _with(record, {"messages": _conversation(record)})
        case _:
            assert_never(shape)


def _instruction(record: Record) -> str:
    instruction, beside = text(record, "instruction"), record.fields.get("input") or ""
    if not isinstance(beside, str):
        raise BadData(f"{record.place}: input is a {type(beside).__name__}; expected text")
    return f"{instruction}\n\n{beside}" if beside else instruction


def _gsm8k(record: Record, wanted: DataFormat) -> Record:
    question, solution = text(record, "question"), text(record, "answer")
    if wanted is not DataFormat.PROMPTS:
        return _asked(record, wanted, question, solution)
    _, mark, number = solution.rpartition(_ANSWER)
    if not mark or not number.strip():
        raise BadData(f"{record.place}: the answer has no {_ANSWER} before its number; leave out shape GSM8K")
    # Rewards compare with the number alone; 1,000 is written as numbers are.
    return _with(_asked(record, wanted, question, number.strip().replace(",", "")), {"solution": solution})


def _asked(record: Record, wanted: DataFormat, prompt: str, answer: str) -> Record:
    user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
    match wanted:
        case DataFormat.CHAT:
            system = record.fields.get("system")
            first = [{"role": "system", "content": system}] if system else []
            return _with(record, {"messages": [*first, user, assistant]})
        case DataFormat.PROMPT_COMPLETION:
            return _with(record, {"prompt": prompt, "completion": answer})
        case DataFormat.PROMPTS:
            return _with(record, {"prompt": [user], "answer": answer})
        case _:
            raise BadData(f"{record.place}: records of this shape cannot become format {wanted}")


def _conversation(record: Record) -> list[Mapping[str, object]]:
    turns = field(record, "conversations")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise BadData(f"{record.place}: conversations is no list; expected objects with from and value")
    return [_message(turn, f"{record.place}, turn {number}") for number, turn in enumerate(turns, start=1)]


def _message(turn: object, place: str) -> Mapping[str, object]:
    sender = turn.get("from") if isinstance(turn, Mapping) else None
    if not isinstance(turn, Mapping) or sender not in _ROLES or "value" not in turn:
        raise BadData(f"{place} is from {sender!r}; expected an object with value, and from one of {', '.join(_ROLES)}")
    weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
    return {"role": _ROLES[sender], "content": turn["value"], **weight}


def _with(record: Record, fields: Mapping[str, object]) -> Record:
    return replace(record, fields={**record.fields, **fields})
