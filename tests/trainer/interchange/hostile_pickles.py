"""Pickles of a stranger, opcode by opcode: what pickle.dumps does not make."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

from moejob_trainer.interchange.inert_pickle import GlobalName

POSIX_PATH = GlobalName("pathlib", "PosixPath")


def ending(*parts: bytes) -> bytes:
    """Return a pickle of these opcodes."""
    return b"\x80\x04" + b"".join(parts) + pickle.STOP


def text(value: str) -> bytes:
    """Return the opcode of a text."""
    content = value.encode()
    return pickle.BINUNICODE + len(content).to_bytes(4, "little") + content


def named(name: GlobalName) -> bytes:
    """Return the opcode that looks up a class or function."""
    return pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode()


def attributes(**values: str) -> bytes:
    """Return a state that sets attributes of anything, a class or a function too: (None, {name: value})."""
    pairs = b"".join(text(name) + text(value) for name, value in values.items())
    return pickle.NONE + pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS + pickle.TUPLE2


def poisoned(name: GlobalName, **values: str) -> bytes:
    """Return opcodes that set attributes of what a name leads to, and leave it on the stack."""
    return named(name) + attributes(**values) + pickle.BUILD


def poisons_paths(victim: str) -> bytes:
    """Return a pickle after which every path of the process reads as the victim's: 69 bytes and more."""
    return ending(poisoned(POSIX_PATH, _str=victim))


def hostile_calls(name: GlobalName) -> Iterator[bytes]:
    """Yield pickles that call a name with arguments which it does not expect, in each way that pickle knows."""
    deep = pickle.EMPTY_TUPLE + pickle.TUPLE1 * 5000
    number = pickle.LONG4 + (4000).to_bytes(4, "little") + b"\x7f" * 4000
    for argument in (text("/etc/passwd") + pickle.TUPLE1, deep, number + pickle.TUPLE1, named(name) + pickle.TUPLE1):
        yield ending(named(name), argument, pickle.REDUCE)
        yield ending(named(name), argument, pickle.NEWOBJ)
        yield ending(named(name), argument, pickle.EMPTY_DICT, pickle.NEWOBJ_EX)
        yield ending(named(name), argument, pickle.REDUCE, attributes(__class__="x"), pickle.BUILD)
    yield ending(pickle.MARK, named(name), text("x"), pickle.OBJ)
    yield ending(pickle.MARK, text("x"), pickle.INST + f"{name.module}\n{name.name}\n".encode())
