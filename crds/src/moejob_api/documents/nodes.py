"""YAML text as nodes, bounded so that no text exhausts stack or memory. Knows nothing of values or jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    ScalarEvent,
    SequenceStartEvent,
)

from moejob_api.documents.syntax import UnreadableError, explain_yaml_error

MAX_DEPTH = 64
# The size of one document with its aliases written out: a character counts 1, a node 16. etcd refuses 1.5 MiB.
MAX_SIZE = 2 * 1024 * 1024
_NODE_SIZE = 16


@dataclass(slots=True)
class ScalarNode:
    """A scalar; if `is_plain`, its text decides its type."""

    text: str
    is_plain: bool
    tag: str | None
    line: int
    size: int
    height: int = 0


@dataclass(slots=True)
class CollectionNode:
    """A list, or a mapping whose items are its keys and values in turn; nodes with an alias are shared."""

    is_mapping: bool
    in_brackets: bool
    tag: str | None
    line: int
    anchor: str | None
    items: list[Node] = field(default_factory=list)
    size: int = _NODE_SIZE
    height: int = 1


Node = ScalarNode | CollectionNode


def parse_nodes(text: str) -> Iterator[Node]:
    """The root of every document."""
    return _NodeComposer().compose_roots(_parse_events(text))


def _parse_events(text: str) -> Iterator[Event]:
    parser = yaml.CLoader(text)
    try:
        while (event := parser.get_event()) is not None:
            yield event
    except yaml.YAMLError as error:
        raise explain_yaml_error(error, text) from None


@dataclass(slots=True)
class _NodeComposer:
    open_collections: list[CollectionNode] = field(default_factory=list)
    anchors: dict[str, Node] = field(default_factory=dict)
    root: Node | None = None

    def compose_roots(self, events: Iterator[Event]) -> Iterator[Node]:
        for event in events:
            match event:
                case DocumentStartEvent():
                    self._begin_document(event)
                case ScalarEvent():
                    self._add_node(self._scalar_node(event), event.anchor)
                case AliasEvent():
                    self._add_node(self._resolve_alias(event), None)
                case MappingStartEvent() | SequenceStartEvent():
                    self._open_collection(event)
                case CollectionEndEvent():
                    collection = self.open_collections.pop()
                    self._add_node(collection, collection.anchor)
                case DocumentEndEvent() if self.root is not None:
                    yield self.root
                case _:
                    pass

    def _begin_document(self, event: DocumentStartEvent) -> None:
        if event.version or event.tags:
            raise UnreadableError("kubectl takes no lines that begin with %; remove them", _line_number(event))
        self.anchors = {}

    def _open_collection(self, event: MappingStartEvent | SequenceStartEvent) -> None:
        # Depth is checked here as well as in _add_node: the parser keeps state for every open bracket.
        if len(self.open_collections) >= MAX_DEPTH:
            raise _depth_error(_line_number(event))
        is_mapping = isinstance(event, MappingStartEvent)
        self.open_collections.append(
            CollectionNode(is_mapping, bool(event.flow_style), event.tag, _line_number(event), event.anchor)
        )

    def _add_node(self, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self.anchors[anchor] = node
        if not self.open_collections:
            self.root = node
            return
        parent = self.open_collections[-1]
        parent.items.append(node)
        parent.size += node.size
        parent.height = max(parent.height, node.height + 1)
        if parent.size > MAX_SIZE:
            raise UnreadableError("too large with its aliases written out; a job is a few kilobytes", node.line)
        if parent.height > MAX_DEPTH:
            raise _depth_error(node.line)

    def _scalar_node(self, event: ScalarEvent) -> ScalarNode:
        is_plain = event.implicit[0]
        if is_plain and "?" in event.value and self.open_collections and self.open_collections[-1].in_brackets:
            raise UnreadableError(
                f"kubectl stops at the ? of {event.value} between brackets; put it in quotes", _line_number(event)
            )
        return ScalarNode(event.value, is_plain, event.tag, _line_number(event), _NODE_SIZE + len(event.value))

    def _resolve_alias(self, event: AliasEvent) -> Node:
        if event.anchor not in self.anchors:
            raise UnreadableError(
                f"*{event.anchor} stands for nothing: no &{event.anchor} is complete before it", _line_number(event)
            )
        return self.anchors[event.anchor]


def _line_number(event: Event) -> int:
    return 0 if event.start_mark is None else event.start_mark.line + 1


def _depth_error(line: int) -> UnreadableError:
    return UnreadableError(f"nested more than {MAX_DEPTH} levels deep; a job needs no more than ten", line)
