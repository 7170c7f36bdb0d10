"""Validation of the records of each format; a message names the place of the record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moejob_api.job.model import TrainedTurns
from moejob_trainer.data.records import Record, refuse_surrogates
from moejob_trainer.errors import BadData

ROLES = ("system", "developer", "user", "assistant", "tool")

# A message as chat templates take it: they read whatever keys their model knows (reasoning_content, name, ...).
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the tools that were offered."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    place: str

    @property
    def characters(self) -> int:
        """The number of characters of all that a template is given, roughly."""
        return len(json.dumps([self.messages, self.tools], default=str))

    @property
    def answers(self) -> tuple[int, ...]:
        """The numbers of the assistant's messages, from 0."""
        return tuple(number for number, message in enumerate(self.messages) if message["role"] == "assistant")

    def trained(self, turns: TrainedTurns) -> tuple[int, ...]:
        """The numbers of the answers that are trained on."""
        first = self._last_turn() if turns is TrainedTurns.LAST else 0
        return tuple(number for number in self.answers if number >= first and self.messages[number].get("weight", 1))

    def _last_turn(self) -> int:
        """Return the number of the first message of the last answered turn, behind the user's message."""
        until = max(self.answers, default=0)
        asked = (number for number, message in enumerate(self.messages[:until]) if message["role"] == "user")
        return max(asked, default=-1) + 1


def conversation(record: Record, key: str = "messages") -> Conversation:
    """The messages of a record."""
    found = field(record, key)
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise BadData(f"{record.place}: {key} is {_shown(found)}; expected a list of at least one message")
    messages = tuple(_message(value, f"{record.place}, message {n}") for n, value in enumerate(found, start=1))
    return Conversation(messages, _tools(record), record.place)


def field(record: Record, key: str) -> object:
    """A field that has to be there."""
    if key not in record.fields:
        raise BadData(f"{record.place}: there is no {key}; found {', '.join(record.fields) or 'nothing'}")
    return record.fields[key]


def text(record: Record, key: str) -> str:
    """A field that has to be text, and not empty."""
    found = field(record, key)
    if not isinstance(found, str) or not found:
        raise BadData(f"{record.place}: {key} is {_shown(found)}; expected text")
    return found


def _message(value: object, place: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadData(f"{place} is {_shown(value)}; expected an object with role and content")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        raise BadData(f"{place} has the role {_shown(role)}; expected one of {', '.join(ROLES)}")
    if message.get("weight", 0) not in ((0, 1) if role == "assistant" else (0,)):
        raise BadData(
            f"{place} has the role {role} and the weight {_shown(message['weight'])}; expected 0, which is not trained "
            "on, or 1, for the assistant alone"
        )
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = _calls(calls, place)
    elif "tool_calls" in message:
        del message["tool_calls"]
    # Templates read content without asking whether it is there.
    message["content"] = _content(message.get("content", "" if calls else None), place)
    return message


def _content(content: object, place: str) -> object:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    if parts and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return content
    raise BadData(f"{place} has the content {_shown(content)}; expected text, or a list of parts of type text")


def _calls(calls: object, place: str) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadData(f"{place} has the tool_calls {_shown(calls)}; expected a list")
    return [_call(call, place) for call in calls]


def _call(call: object, place: str) -> Message:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadData(f"{place} has the tool call {_shown(call)}; expected a function with name and arguments")
    arguments = function.get("arguments", {})
    # As text, templates that write JSON would quote it a second time.
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{place}: the arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise BadData(f"{place}: the arguments of {function['name']} are {_shown(arguments)}; expected an object")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _tools(record: Record) -> tuple[Message, ...]:
    found = record.fields.get("tools") or ()
    # Files with columns hold tools as text, for no two schemas have the same columns.
    if isinstance(found, str):
        found = _parsed(found, f"{record.place}: tools") or ()
    if not isinstance(found, Sequence) or not all(isinstance(tool, Mapping) for tool in found):
        raise BadData(f"{record.place}: tools is {_shown(found)}; expected a list of function schemas")
    return tuple(found)


def _parsed(written: str, what: str) -> Any:
    try:
        parsed = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{what} are not JSON: {error}") from error
    refuse_surrogates(parsed, what)
    return parsed


def _shown(value: object) -> str:
    if value is None:
        return "absent"
    written = json.dumps(value, ensure_ascii=False, default=str)
    return written if len(written) <= 60 else f"{written[:57]}..."
