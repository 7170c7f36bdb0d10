"""A stranger's pickle makes values of ours, whatever its opcodes say: nothing is looked up, called or changed."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Mapping
from importlib import import_module

import pytest

from fuzzing import damage_sample, random_sources
from moejob_trainer.interchange import checkpoint_index, stored_tensor
from moejob_trainer.interchange.inert_pickle import (
    GlobalName,
    PickledDict,
    RecordedCall,
    RefusedPickle,
    StoredValue,
    Value,
    read_pickle,
)
from trainer.interchange.hostile_pickles import ending, hostile_calls, named, poisoned, text

NAMES = sorted(checkpoint_index.NAMES | stored_tensor.NAMES, key=lambda name: (name.module, name.name))
OURS = (bool, int, float, str, bytes, tuple, list, type(None), PickledDict, GlobalName, RecordedCall, StoredValue)
SIZE = GlobalName("torch", "Size")


def live(name: GlobalName) -> object:
    """Return what a name leads to in this process; None where it is not here."""
    return getattr(sys.modules.get(name.module), name.name, None)


def attributes_of(name: GlobalName) -> Mapping[str, object]:
    return dict(getattr(live(name), "__dict__", {}))


def values_in(value: Value) -> list[object]:
    """Return everything that a value is made of."""
    reached: dict[int, object] = {}
    waiting: list[object] = [value]
    while waiting:
        last = waiting.pop()
        if id(last) in reached:
            continue
        reached[id(last)] = last
        match last:
            case tuple() | list():
                waiting += last
            case PickledDict(items=items):
                waiting += items
            case RecordedCall(arguments=arguments, state=state, items=items):
                waiting += [arguments, state, items]
            case StoredValue(identifier=identifier):
                waiting.append(identifier)
            case _:
                pass
    return [*reached.values()]


def test_the_allowed_names_lead_to_classes_and_functions_here() -> None:
    for module in {name.module for name in NAMES if not name.module.startswith("megatron")}:
        import_module(module)
    # Else the rows below would change nothing because there is nothing.
    assert sum(live(name) is not None for name in NAMES) > 40


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name.module}.{name.name}")
def test_nothing_is_set_on_what_an_allowed_name_leads_to(name: GlobalName) -> None:
    before = attributes_of(name)
    with pytest.raises(RefusedPickle, match="sets attributes of what it did not make"):
        read_pickle(ending(poisoned(name, _str="/victim", __code__="x")), NAMES)
    assert attributes_of(name) == before


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name.module}.{name.name}")
def test_nothing_that_an_allowed_name_leads_to_is_called(name: GlobalName) -> None:
    before = attributes_of(name)
    for content in hostile_calls(name):
        try:
            value = read_pickle(content, NAMES)
        except RefusedPickle:
            continue
        assert isinstance(value, RecordedCall)
        assert {type(each) for each in values_in(value)} <= {*OURS}
    assert attributes_of(name) == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(ending(named(GlobalName("os", "system"))), "it names os.system", id="another name"),
        pytest.param(
            ending(text("posix"), text("system"), pickle.STACK_GLOBAL), "it names posix.system", id="on stack"
        ),
        pytest.param(ending(text("torch"), text("Size.__new__"), pickle.STACK_GLOBAL), "it names torch", id="dotted"),
        pytest.param(ending(pickle.NONE, pickle.NONE, pickle.STACK_GLOBAL), "other values than text", id="no text"),
        pytest.param(ending(pickle.EXT1 + b"\x01"), "EXT1", id="extension of one byte"),
        pytest.param(ending(pickle.EXT2 + b"\x01\x00"), "EXT2", id="extension of two bytes"),
        pytest.param(ending(pickle.EXT4 + b"\x01\x00\x00\x00"), "EXT4", id="extension of four bytes"),
        pytest.param(ending(pickle.PERSID + b"os\n"), "PERSID", id="persistent id as text"),
        pytest.param(ending(text("os"), pickle.BINPERSID), "values outside of it", id="persistent id"),
        pytest.param(ending(b"\x97"), "NEXT_BUFFER", id="buffer out of band"),
        pytest.param(
            ending(text("x"), pickle.EMPTY_TUPLE, pickle.REDUCE), "calls what is no name", id="call of a text"
        ),
        pytest.param(
            ending(named(SIZE), pickle.EMPTY_LIST, pickle.REDUCE), "calls what is no name", id="arguments in a list"
        ),
        pytest.param(
            ending(named(SIZE), pickle.EMPTY_TUPLE, pickle.REDUCE, (pickle.EMPTY_DICT + pickle.BUILD) * 2),
            "or twice",
            id="built twice",
        ),
        pytest.param(ending(text("x"), text("y"), pickle.APPEND), "no list", id="append to a text"),
        pytest.param(ending(text("x") * 3, pickle.SETITEM), "no dictionary", id="key of a text"),
        pytest.param(ending(pickle.BINGET + b"\x07"), "damaged", id="nothing remembered"),
        pytest.param(ending(pickle.MARK, pickle.TUPLE1), "damaged", id="below a mark"),
        pytest.param(ending(pickle.POP * 3), "damaged", id="empty stack"),
        pytest.param(b"\x80\x09.", "its protocol is 9", id="protocol"),
        pytest.param(b"\x80\x04N", "damaged|too early", id="no end"),
        pytest.param(ending(pickle.LONG + b"9" * 10_000 + b"L\n"), "damaged", id="digits"),
        pytest.param(ending(pickle.BINUNICODE8 + b"\xff" * 7 + b"\x7f" + b"x"), "damaged", id="length"),
        pytest.param(ending(pickle.BINUNICODE + b"\x01\x00\x00\x00\xff"), "damaged", id="not UTF-8"),
    ],
)
def test_what_no_file_of_its_kind_has_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(RefusedPickle, match=reason):
        read_pickle(content, NAMES)


def test_nesting_and_cycles_cost_their_bytes() -> None:
    deep = read_pickle(ending(pickle.EMPTY_TUPLE, pickle.TUPLE1 * 1_000_000), NAMES)
    assert isinstance(deep, tuple)
    # A list of the list before, twice, sixty times: 2^60 leaves for who follows them.
    doubled = b"".join(
        pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.MARK + (pickle.BINGET + bytes([at])) * 2 + pickle.APPENDS
        for at in range(60)
    )
    bomb = read_pickle(ending(pickle.EMPTY_LIST + pickle.MEMOIZE, doubled), NAMES)
    assert len(values_in(bomb)) == 61
    itself = read_pickle(ending(pickle.EMPTY_LIST, pickle.MEMOIZE, pickle.BINGET + b"\0", pickle.APPEND), NAMES)
    assert len(values_in(itself)) == 1


def test_a_place_in_the_memo_takes_no_memory_before_it() -> None:
    assert read_pickle(ending(pickle.NONE, pickle.LONG_BINPUT + b"\xff\xff\xff\xff"), NAMES) is None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_read_as_pickle_reads_them(protocol: int) -> None:
    values: list[object] = [
        None,
        True,
        False,
        0,
        -1,
        300,
        2**40,
        -(2**90),
        1.5,
        "täxt",
        (),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
        [[]],
    ]
    assert read_pickle(pickle.dumps(values, protocol), NAMES) == values


def test_damaged_pickles_are_refused_or_make_values_of_ours() -> None:
    samples = [
        *(pickle.dumps([1, (2.5, "text"), {"key": [None, True]}], protocol) for protocol in range(6)),
        *(content for name in NAMES[:8] for content in hostile_calls(name) if len(content) < 1000),
        *(ending(poisoned(name, _str="/victim")) for name in NAMES[:8]),
    ]
    read = 0
    before = {name: attributes_of(name) for name in NAMES}
    for draw in random_sources():
        read += _reads(draw, samples)
    assert read
    assert {name: attributes_of(name) for name in NAMES} == before


def _reads(draw: random.Random, samples: list[bytes]) -> bool:
    try:
        value = read_pickle(damage_sample(draw, samples), NAMES, has_stored_values=draw.random() < 0.5)
    except RefusedPickle:
        return False
    assert {type(each) for each in values_in(value)} <= {*OURS}
    return True
