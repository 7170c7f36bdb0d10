"""YAML and JSON text as plain values, as kubectl reads it; but what kubectl drops or turns around is refused here.

kubectl keeps the last of two equal keys, reads the key `on` as "true", and lets a `<<` below a field replace it. Each
of these is an error with its line. Knows nothing of jobs.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from pydantic import JsonValue

from moejob_api.documents.nodes import CollectionNode, Node, ScalarNode, parse_nodes
from moejob_api.documents.scalars import NotFiniteError, Scalar, resolve_scalar
from moejob_api.documents.syntax import UnreadableError

_MERGE = "<<"
_TEXT_TAG = "tag:yaml.org,2002:str"
# kubectl splits text at every line that begins so, and takes nothing but a comment behind it.
_BAD_SEPARATOR = re.compile(r"^---[ \t]*[^#\s]", re.MULTILINE)


def parse_documents(text: str) -> list[JsonValue]:
    """Every document of a text that is not empty."""
    if text.lstrip()[:1] == "{":
        try:
            return [_parse_json(text)]
        except (ValueError, RecursionError):
            # YAML in braces, or JSON to be refused with a line: both are for below.
            pass
    separator = _BAD_SEPARATOR.search(text)
    if separator is not None:
        line = text.count("\n", 0, separator.start()) + 1
        raise UnreadableError("nothing may follow --- on its line; start the document on the next one", line)
    roots = (_node_value(root, "") for root in parse_nodes(text))
    return [root for root in roots if root is not None]


def _parse_json(text: str) -> JsonValue:
    value: JsonValue = json.loads(
        text,
        object_pairs_hook=_unique_mapping,
        parse_float=_parse_number,
        parse_int=_parse_number,
        parse_constant=_refuse_text,
    )
    return value


def _unique_mapping(pairs: list[tuple[str, JsonValue]]) -> JsonValue:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


def _parse_number(text: str) -> int | float:
    value = resolve_scalar(text)
    return value if isinstance(value, int | float) else _refuse_text(text)


def _refuse_text(text: str) -> NoReturn:
    raise ValueError(text)


def _node_value(node: Node, path: str) -> JsonValue:
    if isinstance(node, ScalarNode):
        return _scalar_value(node, path)
    _refuse_tag(node, path)
    if node.is_mapping:
        return _mapping_value(node, path)
    return [_node_value(item, f"{path}[{index}]") for index, item in enumerate(node.items)]


def _mapping_value(node: CollectionNode, path: str) -> dict[str, JsonValue]:
    values: dict[str, JsonValue] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in zip(node.items[::2], node.items[1::2], strict=True):
        key = _key_text(key_node, path)
        inside = f"{path}.{key}" if path else key
        if key in lines:
            raise UnreadableError(f"given a second time, first on line {lines[key]}; remove one", key_node.line, inside)
        if _is_merge(key_node):
            merged = _merged_fields(value_node, inside)
            _refuse_replaced_fields(merged, values, key_node.line, path)
            values |= merged
        else:
            values[key] = _node_value(value_node, inside)
        lines[key] = key_node.line
    return values


def _is_merge(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.text == _MERGE and node.is_plain


def _merged_fields(node: Node, path: str) -> dict[str, JsonValue]:
    if isinstance(node, CollectionNode) and node.is_mapping:
        return _mapping_value(node, path)
    if isinstance(node, CollectionNode) and all(
        isinstance(item, CollectionNode) and item.is_mapping for item in node.items
    ):
        merged: dict[str, JsonValue] = {}
        # The first of several wins.
        for item in reversed(node.items):
            merged |= _merged_fields(item, path)
        return merged
    raise UnreadableError("<< takes a mapping or a list of mappings", node.line, path)


def _refuse_replaced_fields(merged: dict[str, JsonValue], earlier: dict[str, JsonValue], line: int, path: str) -> None:
    replaced = sorted(merged.keys() & earlier.keys())
    if replaced:
        raise UnreadableError(
            f"<< gives {', '.join(replaced)} again, and kubectl and YAML disagree about which one counts; "
            "put << before all fields that differ from it",
            line,
            path,
        )


def _key_text(node: Node, path: str) -> str:
    if isinstance(node, CollectionNode):
        raise UnreadableError(
            "a list or mapping in place of a field's name; put text that begins with [ or { in quotes", node.line, path
        )
    value = _scalar_value(node, path)
    if isinstance(value, str):
        return value
    if isinstance(value, int) and json.dumps(value) == node.text:
        return node.text
    read_as = "nothing" if value is None else json.dumps(value)
    raise UnreadableError(
        f"YAML reads the name {node.text or '(empty)'} as {read_as}; put it in quotes", node.line, path
    )


def _scalar_value(node: ScalarNode, path: str) -> Scalar:
    if node.tag == _TEXT_TAG:
        return node.text
    _refuse_tag(node, path)
    if not node.is_plain:
        return node.text
    try:
        return resolve_scalar(node.text)
    except NotFiniteError:
        raise UnreadableError(f"{node.text} is not a number that Kubernetes can store", node.line, path) from None


def _refuse_tag(node: Node, path: str) -> None:
    if node.tag is not None:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise UnreadableError(f"the tag {tag} is not for jobs; remove it and write the value itself", node.line, path)
