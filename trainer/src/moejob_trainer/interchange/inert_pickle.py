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
    "bool | int | float | str | bytes | tuple[Value, ...] | list[Value] | PickledDict | GlobalName | RecordedCall | "
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
class PickledDict:
    """A dictionary: its keys and values in the order in which they are set."""

    items: list[tuple[Value, Value]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class RecordedCall:
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
    machine = _PickleMachine(names, has_stored_values)
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return machine.pop_value()
            machine.run(opcode.name, argument)
    except RefusedPickle:
        raise
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise RefusedPickle(f"it is damaged: {type(error).__name__}") from error
    raise RefusedPickle("it ends too early")


class _PickleMachine:
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

    def pop_value(self) -> Value:
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

    def last_value(self) -> Value:
        """Return the last value and leave it."""
        value = self.pop_value()
        self.stack.append(value)
        return value

    def push_mark(self, _: object) -> None:
        self.marks.append(len(self.stack))

    def drop_value(self, _: object) -> None:
        # As in Python, POP above a mark removes the mark.
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop_value()

    def push_global(self, argument: object) -> None:
        module, _, name = str(argument).partition(" ")
        self._push_name(module, name)

    def push_stack_global(self, _: object) -> None:
        name, module = self.pop_value(), self.pop_value()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise RefusedPickle("it names something by other values than text")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        global_name = GlobalName(module, name)
        if global_name not in self.names:
            raise RefusedPickle(f"it names {f'{module}.{name}'[:200]}")
        self.stack.append(global_name)

    def record_call(self, _: object) -> None:
        arguments, callee = self.pop_value(), self.pop_value()
        if not (isinstance(callee, GlobalName) and isinstance(arguments, tuple)):
            raise RefusedPickle("it calls what is no name")
        self.stack.append(RecordedCall(callee, arguments))

    def set_state(self, _: object) -> None:
        state, target = self.pop_value(), self.last_value()
        if not isinstance(target, RecordedCall) or target.state is not None:
            raise RefusedPickle("it sets attributes of what it did not make, or twice")
        target.state = state

    def extend_list(self, values: list[Value]) -> None:
        target = self.last_value()
        if not isinstance(target, list):
            raise RefusedPickle("it appends to what is no list")
        target.extend(values)

    def set_items(self, values: list[Value]) -> None:
        target = self.last_value()
        if not isinstance(target, PickledDict | RecordedCall) or len(values) % 2:
            raise RefusedPickle("it sets keys of what is no dictionary")
        target.items.extend(zip(values[::2], values[1::2], strict=True))

    def push_stored_value(self, _: object) -> None:
        if not self.has_stored_values:
            raise RefusedPickle("it refers to values outside of it")
        self.stack.append(StoredValue(self.pop_value()))

    def memoize_last(self, argument: object) -> None:
        memo_index = argument if isinstance(argument, int) else len(self.memo)
        self.memo[memo_index] = self.last_value()

    def push_memoized(self, argument: object) -> None:
        if not isinstance(argument, int):
            raise KeyError(argument)
        self.stack.append(self.memo[argument])

    def push_value(self, value: Value) -> None:
        self.stack.append(value)


def _push_tuple_of(count: int) -> Callable[[_PickleMachine, object], None]:
    def push_tuple(machine: _PickleMachine, _: object) -> None:
        values = [machine.pop_value() for _ in range(count)]
        machine.push_value(tuple(reversed(values)))

    return push_tuple


def _check_protocol(_: _PickleMachine, argument: object) -> None:
    if not isinstance(argument, int) or argument > _HIGHEST_PROTOCOL:
        raise RefusedPickle(f"its protocol is {argument}; {_HIGHEST_PROTOCOL} is the last")


def _set_single(machine: _PickleMachine, _: object) -> None:
    value, key = machine.pop_value(), machine.pop_value()
    machine.set_items([key, value])


def _append_single(machine: _PickleMachine, _: object) -> None:
    machine.extend_list([machine.pop_value()])


def _drop_to_mark(machine: _PickleMachine, _: object) -> None:
    machine.pop_to_mark()


def _push_dictionary(machine: _PickleMachine, _: object) -> None:
    values = machine.pop_to_mark()
    machine.push_value(PickledDict())
    machine.set_items(values)


_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_LITERALS = frozenset((*_NUMBERS, *_TEXTS, "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"))
_OPERATIONS: dict[str, Callable[[_PickleMachine, object], None]] = {
    "PROTO": _check_protocol,
    "FRAME": lambda _, __: None,
    "NONE": lambda machine, _: machine.push_value(None),
    "NEWTRUE": lambda machine, _: machine.push_value(True),
    "NEWFALSE": lambda machine, _: machine.push_value(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push_value(()),
    "EMPTY_LIST": lambda machine, _: machine.push_value([]),
    "EMPTY_DICT": lambda machine, _: machine.push_value(PickledDict()),
    "TUPLE1": _push_tuple_of(1),
    "TUPLE2": _push_tuple_of(2),
    "TUPLE3": _push_tuple_of(3),
    "TUPLE": lambda machine, _: machine.push_value(tuple(machine.pop_to_mark())),
    "LIST": lambda machine, _: machine.push_value(machine.pop_to_mark()),
    "DICT": _push_dictionary,
    "APPEND": _append_single,
    "APPENDS": lambda machine, _: machine.extend_list(machine.pop_to_mark()),
    "SETITEM": _set_single,
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "MARK": _PickleMachine.push_mark,
    "POP": _PickleMachine.drop_value,
    "POP_MARK": _drop_to_mark,
    "DUP": lambda machine, _: machine.push_value(machine.last_value()),
    "PUT": _PickleMachine.memoize_last,
    "BINPUT": _PickleMachine.memoize_last,
    "LONG_BINPUT": _PickleMachine.memoize_last,
    "MEMOIZE": _PickleMachine.memoize_last,
    "GET": _PickleMachine.push_memoized,
    "BINGET": _PickleMachine.push_memoized,
    "LONG_BINGET": _PickleMachine.push_memoized,
    "GLOBAL": _PickleMachine.push_global,
    "STACK_GLOBAL": _PickleMachine.push_stack_global,
    "REDUCE": _PickleMachine.record_call,
    "NEWOBJ": _PickleMachine.record_call,
    "BUILD": _PickleMachine.set_state,
    "BINPERSID": _PickleMachine.push_stored_value,
}
