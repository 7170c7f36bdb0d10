"""JSON that follows the grammar of a model and is hostile within it: a million errors are as good a message as one.

Damaged samples (fuzzing.py) find parsers that break. These find parsers that take long: one place of each message is
flooded up to a size, with right values, wrong ones, empty ones or fields without a meaning.
"""

from __future__ import annotations

import json
import random
from typing import Any

from pydantic import BaseModel

_TEXTS = ("", "a", "all is well", "\u202e\x1b[2J", "\u00e9" * 40, "9" * 30)
_WRONG = ("{}", "[]", "null", "true", "-1", "1e999", '"text"', "0.5", "9" * 40, '{"a":{}}', "[[]]")
_LONGEST_TEXT = 3_000


class MessageGrammar:
    """Writes messages of one model."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._root: dict[str, Any] = model.model_json_schema(by_alias=True)

    def write_message(self, draw: random.Random, most_bytes: int) -> bytes:
        """Write one message, about as long as allowed in half of all cases."""
        room = draw.choice((0, most_bytes))
        return self._write_value(draw, self._root, room).encode()[:most_bytes]

    def _write_value(self, draw: random.Random, schema: dict[str, Any], room: int) -> str:
        schema = self._resolve(draw, schema)
        if draw.random() < 0.05:
            return draw.choice(_WRONG)
        match schema.get("type"):
            case "object":
                return self._write_object(draw, schema, room)
            case "array":
                return self._write_array(draw, schema, room)
            case "string" if "enum" in schema:
                return json.dumps(draw.choice(schema["enum"]))
            case "string":
                text = draw.choice(_TEXTS)
                return json.dumps(
                    text * min(_LONGEST_TEXT, room // 8) if room else text, ensure_ascii=draw.random() < 0.5
                )
            case "boolean":
                return draw.choice(("true", "false"))
            case "integer" | "number":
                return "9" * room if room and draw.random() < 0.3 else draw.choice(("0", "1", "7", "2147483647", "0.5"))
            case _:
                return draw.choice(_WRONG)

    def _write_object(self, draw: random.Random, schema: dict[str, Any], room: int) -> str:
        properties: dict[str, Any] = schema.get("properties", {})
        required = schema.get("required", ())
        names = [name for name in properties if name in required or draw.random() < 0.6]
        flooded = draw.choice([*names, None]) if names else None
        pairs = [
            f'"{name}":{self._write_value(draw, properties[name], room if name == flooded else 0)}' for name in names
        ]
        if flooded is None and room:
            pairs += self._write_flood(draw, schema, room)
        return f"{{{','.join(pairs)}}}"

    def _write_flood(self, draw: random.Random, schema: dict[str, Any], room: int) -> list[str]:
        inner = schema.get("additionalProperties")
        value = self._write_value(draw, inner, 0) if isinstance(inner, dict) and draw.random() < 0.5 else None
        value = value or draw.choice(_WRONG)
        same = draw.random() < 0.2
        return [f'"{0 if same else number:x}":{value}' for number in range(room // (len(value) + 8))]

    def _write_array(self, draw: random.Random, schema: dict[str, Any], room: int) -> str:
        item = draw.choice(_WRONG) if draw.random() < 0.4 else self._write_value(draw, schema.get("items", {}), 0)
        count = room // (len(item) + 1) if room else draw.randrange(4)
        return f"[{','.join([item] * count)}]"

    def _resolve(self, draw: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema or "anyOf" in schema:
            if "anyOf" in schema:
                # An absent value floods nothing.
                schema = draw.choice([each for each in schema["anyOf"] if each.get("type") != "null"])
                continue
            schema = self._root["$defs"][schema["$ref"].rpartition("/")[2]]
        return schema
