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
    def character_count(self) -> int:
        """The number of characters of all that a template is given, roughly."""
        return len(json.dumps([self.messages, self.tools], default=str))

    @property
    def assistant_indexes(self) -> tuple[int, ...]:
        """The numbers of the assistant's messages, from 0."""
        return tuple(number for number, message in enumerate(self.messages) if message["role"] == "assistant")

    def trained_indexes(self, turns: TrainedTurns) -> tuple[int, ...]:
        """The numbers of the answers that are trained on."""
        first = self._last_turn_start() if turns is TrainedTurns.LAST else 0
        return tuple(
            number for number in self.assistant_indexes if number >= first and self.messages[number].get("weight", 1)
        )

    def _last_turn_start(self) -> int:
        """Return the number of the first message of the last answered turn, behind the user's message."""
        until = max(self.assistant_indexes, default=0)
        user_indexes = (number for number, message in enumerate(self.messages[:until]) if message["role"] == "user")
        return max(user_indexes, default=-1) + 1


def read_conversation(record: Record, key: str = "messages") -> Conversation:
    """The messages of a record."""
    message_list = require_field(record, key)
    if not isinstance(message_list, Sequence) or isinstance(message_list, str) or not message_list:
        raise BadData(
            f"{record.place}: {key} is {_shorten_value(message_list)}; expected a list of at least one message"
        )
    messages = tuple(
        _read_chat_message(value, f"{record.place}, message {n}") for n, value in enumerate(message_list, start=1)
    )
    return Conversation(messages, _read_tools(record), record.place)


def require_field(record: Record, key: str) -> object:
    """A field that has to be there."""
    if key not in record.fields:
        raise BadData(f"{record.place}: there is no {key}; found {', '.join(record.fields) or 'nothing'}")
    return record.fields[key]


def require_text(record: Record, key: str) -> str:
    """A field that has to be text, and not empty."""
    value = require_field(record, key)
    if not isinstance(value, str) or not value:
        raise BadData(f"{record.place}: {key} is {_shorten_value(value)}; expected text")
    return value


def _read_chat_message(value: object, place: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadData(f"{place} is {_shorten_value(value)}; expected an object with role and content")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        raise BadData(f"{place} has the role {_shorten_value(role)}; expected one of {', '.join(ROLES)}")
    if message.get("weight", 0) not in ((0, 1) if role == "assistant" else (0,)):
        raise BadData(
            f"{place} has the role {role} and the weight {_shorten_value(message['weight'])}; expected 0, which is "
            "not trained on, or 1, for the assistant alone"
        )
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = _read_tool_calls(calls, place)
    elif "tool_calls" in message:
        del message["tool_calls"]
    # Templates read content without asking whether it is there.
    message["content"] = _read_message_content(message.get("content", "" if calls else None), place)
    return message


def _read_message_content(content: object, place: str) -> object:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    if parts and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return content
    raise BadData(f"{place} has the content {_shorten_value(content)}; expected text, or a list of parts of type text")


def _read_tool_calls(calls: object, place: str) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadData(f"{place} has the tool_calls {_shorten_value(calls)}; expected a list")
    return [_read_tool_call(call, place) for call in calls]


def _read_tool_call(call: object, place: str) -> Message:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadData(f"{place} has the tool call {_shorten_value(call)}; expected a function with name and arguments")
    arguments = function.get("arguments", {})
    # As text, templates that write JSON would quote it a second time.
    if isinstance(arguments, str):
        arguments = _parse_json_text(arguments, f"{place}: the arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise BadData(
            f"{place}: the arguments of {function['name']} are {_shorten_value(arguments)}; expected an object"
        )
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _read_tools(record: Record) -> tuple[Message, ...]:
    schemas = record.fields.get("tools") or ()
    # Files with columns hold tools as text, for no two schemas have the same columns.
    if isinstance(schemas, str):
        schemas = _parse_json_text(schemas, f"{record.place}: tools") or ()
    if not isinstance(schemas, Sequence) or not all(isinstance(tool, Mapping) for tool in schemas):
        raise BadData(f"{record.place}: tools is {_shorten_value(schemas)}; expected a list of function schemas")
    return tuple(schemas)


def _parse_json_text(json_text: str, description: str) -> Any:
    try:
        parsed = json.loads(json_text)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{description} are not JSON: {error}") from error
    refuse_surrogates(parsed, description)
    return parsed


def _shorten_value(value: object) -> str:
    if value is None:
        return "absent"
    json_text = json.dumps(value, ensure_ascii=False, default=str)
    return json_text if len(json_text) <= 60 else f"{json_text[:57]}..."
