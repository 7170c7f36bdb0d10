"""An interpreter of pickles that makes only values of its own: it looks up no name and calls nothing.

A list of allowed names is no protection: BUILD sets attributes of any object that an allowed name leads to, so a pickle
with names of plain classes can change these until one deletes files. Here a name stays a name, a call stays a record of
the call, and a dictionary is a list of pairs, so no hash or comparison that the file chooses ever runs. Work and memory
are linear in the bytes; nesting is not followed.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = (
    "bool | int | float | str | bytes | tuple[Value, ...] | list[Value] | Pairs | GlobalName | Instance | "
    "StoredValue | None"
)
_HIGHEST_PROTOCOL = 5


class RefusedPickle(ValueError):
    """A pickle that is damaged, or holds something that no file of its kind has."""


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function as a pickle names it."""

    module: str
    name: str


# Neither compared nor printed: a value that contains itself would never end.
@dataclass(slots=True, eq=False, repr=False)
class Pairs:
    """A dictionary: its keys and values in the order in which they are set."""

    items: list[tuple[Value, Value]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Instance:
    """A recorded call: the name that is called, its arguments, and what is set on the result."""

    made_of: GlobalName
    arguments: tuple[Value, ...]
    state: Value = None
    items: list[tuple[Value, Value]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoredValue:
    """A value outside of the pickle, by the identifier that the pickle gives it."""

    identifier: Value


def read_pickle(content: bytes, names: Collection[GlobalName], *, has_stored_values: bool = False) -> Value:
    """Return the value of a pickle; RefusedPickle where it names anything else than `names`, or cannot be read."""
    machine = _Machine(names, has_stored_values)
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return machine.pop()
            machine.run(opcode.name, argument)
    except RefusedPickle:
        raise
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise RefusedPickle(f"it is damaged: {type(error).__name__}") from error
    raise RefusedPickle("it ends too early")


class _Machine:
    """Stack, marks and memo of one pickle."""

    def __init__(self, names: Collection[GlobalName], has_stored_values: bool) -> None:
        self.names, self.has_stored_values = names, has_stored_values
        self.stack: list[Value] = []
        self.marks: list[int] = []
        self.memo: dict[int, Value] = {}

    def run(self, opcode: str, argument: object) -> None:
        if opcode in _LITERALS:
            # Texts, bytes and numbers, which pickletools makes.
            self.stack.append(argument)  # type: ignore[arg-type]
            return
        operation = _OPERATIONS.get(opcode)
        if operation is None:
            raise RefusedPickle(f"it holds {opcode}, which no file of its kind has")
        operation(self, argument)

    def pop(self) -> Value:
        """Take the last value, which has to lie above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise IndexError
        return self.stack.pop()

    def pop_to_mark(self) -> list[Value]:
        """Take all values above the last mark, and the mark."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def last(self) -> Value:
        """Return the last value and leave it."""
        value = self.pop()
        self.stack.append(value)
        return value

    def mark(self, _: object) -> None:
        self.marks.append(len(self.stack))

    def drop(self, _: object) -> None:
        # As in Python, POP above a mark removes the mark.
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop()

    def name(self, argument: object) -> None:
        module, _, name = str(argument).partition(" ")
        self._push_name(module, name)

    def name_from_stack(self, _: object) -> None:
        name, module = self.pop(), self.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise RefusedPickle("it names something by other values than text")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        named = GlobalName(module, name)
        if named not in self.names:
            raise RefusedPickle(f"it names {f'{module}.{name}'[:200]}")
        self.stack.append(named)

    def call(self, _: object) -> None:
        arguments, called = self.pop(), self.pop()
        if not (isinstance(called, GlobalName) and isinstance(arguments, tuple)):
            raise RefusedPickle("it calls what is no name")
        self.stack.append(Instance(called, arguments))

    def build(self, _: object) -> None:
        state, target = self.pop(), self.last()
        if not isinstance(target, Instance) or target.state is not None:
            raise RefusedPickle("it sets attributes of what it did not make, or twice")
        target.state = state

    def extend(self, values: list[Value]) -> None:
        target = self.last()
        if not isinstance(target, list):
            raise RefusedPickle("it appends to what is no list")
        target.extend(values)

    def set_items(self, values: list[Value]) -> None:
        target = self.last()
        if not isinstance(target, Pairs | Instance) or len(values) % 2:
            raise RefusedPickle("it sets keys of what is no dictionary")
        target.items.extend(zip(values[::2], values[1::2], strict=True))

    def stored_value(self, _: object) -> None:
        if not self.has_stored_values:
            raise RefusedPickle("it refers to values outside of it")
        self.stack.append(StoredValue(self.pop()))

    def memoize(self, argument: object) -> None:
        place = argument if isinstance(argument, int) else len(self.memo)
        self.memo[place] = self.last()

    def recall(self, argument: object) -> None:
        if not isinstance(argument, int):
            raise KeyError(argument)
        self.stack.append(self.memo[argument])

    def push(self, value: Value) -> None:
        self.stack.append(value)


def _tuple_of(count: int) -> Callable[[_Machine, object], None]:
    def push_tuple(machine: _Machine, _: object) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.push(tuple(reversed(values)))

    return push_tuple


def _proto(_: _Machine, argument: object) -> None:
    if not isinstance(argument, int) or argument > _HIGHEST_PROTOCOL:
        raise RefusedPickle(f"its protocol is {argument}; {_HIGHEST_PROTOCOL} is the last")


def _set_single(machine: _Machine, _: object) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


def _append_single(machine: _Machine, _: object) -> None:
    machine.extend([machine.pop()])


def _drop_to_mark(machine: _Machine, _: object) -> None:
    machine.pop_to_mark()


def _dictionary(machine: _Machine, _: object) -> None:
    values = machine.pop_to_mark()
    machine.push(Pairs())
    machine.set_items(values)


_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_LITERALS = frozenset((*_NUMBERS, *_TEXTS, "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"))
_OPERATIONS: dict[str, Callable[[_Machine, object], None]] = {
    "PROTO": _proto,
    "FRAME": lambda _, __: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push(Pairs()),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "LIST": lambda machine, _: machine.push(machine.pop_to_mark()),
    "DICT": _dictionary,
    "APPEND": _append_single,
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "SETITEM": _set_single,
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "MARK": _Machine.mark,
    "POP": _Machine.drop,
    "POP_MARK": _drop_to_mark,
    "DUP": lambda machine, _: machine.push(machine.last()),
    "PUT": _Machine.memoize,
    "BINPUT": _Machine.memoize,
    "LONG_BINPUT": _Machine.memoize,
    "MEMOIZE": _Machine.memoize,
    "GET": _Machine.recall,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.stored_value,
}
