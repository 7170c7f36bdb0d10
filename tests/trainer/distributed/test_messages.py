"""Messages between ranks: they arrive as they were sent, and what a peer sends runs no code here."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from moejob_trainer.distributed import messages
from moejob_trainer.distributed.encoding import INTEGER, TEXT, Array, BadMessage, decode_message, encode_message
from moejob_trainer.distributed.messages import Dtype
from trainer.worlds import Worlds


@dataclass(frozen=True)
class Report:
    """A value of the kinds that ranks send."""

    loss: float
    dtype: Dtype
    shape: tuple[int, ...]
    folder: Path


REPORT = TypeAdapter(Report)


def _report(rank: int) -> Report:
    return Report(float("inf"), torch.bfloat16, (rank,) * rank, Path("/volume") / ("x" * 1000 * rank))


def _exchanged() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    expected = [_report(one) for one in range(size)]
    assert messages.all_gather_values(_report(rank), REPORT, world) == expected
    assert messages.gather_values(_report(rank), REPORT, world) == (expected if rank == 0 else None)
    assert messages.broadcast_value(_report(rank), REPORT, world, source=1) == expected[1]
    assert messages.gather_bytes(b"a" * rank, world) == ([b"", b"a"] if rank == 0 else None)
    messages.wait_for_group(world)


def test_values_of_every_rank_arrive_as_they_were_sent(worlds: Worlds) -> None:
    worlds.run(2, _exchanged)


class Exploit:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def _attacked(path: str) -> None:
    """Rank 1 sends what torch's all_gather_object would unpickle on rank 0."""
    if dist.get_rank() == 1:
        content = torch.from_numpy(np.frombuffer(pickle.dumps(Exploit(path)), np.uint8).copy())
        dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([len(content)]))
        dist.all_gather([torch.empty_like(content) for _ in range(2)], content)
        return
    with pytest.raises(BadMessage, match="does not expect"):
        messages.all_gather_values("fine", TEXT, dist.group.WORLD)


def test_a_pickle_of_a_peer_is_refused_and_runs_nothing(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "code-ran"
    worlds.run(2, _attacked, str(path))
    assert not path.exists()


def _announced() -> None:
    if dist.get_rank() == 1:
        dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([2**60]))
        return
    with pytest.raises(BadMessage, match=str(2**60)):
        messages.all_gather_values("fine", TEXT, dist.group.WORLD)


def test_a_size_beyond_the_bound_takes_no_memory(worlds: Worlds) -> None:
    worlds.run(2, _announced)


def _mistaken() -> None:
    wrong: Any = "no number" if dist.get_rank() == 0 else None
    with pytest.raises(BadMessage):
        messages.broadcast_value(wrong, INTEGER, dist.group.WORLD)


def test_a_value_of_another_type_fails_on_every_rank_alike(worlds: Worlds) -> None:
    worlds.run(2, _mistaken)


def test_a_measurement_that_is_no_number_arrives_as_that() -> None:
    floats = TypeAdapter(list[float])
    assert isnan(decode_message(encode_message([float("nan")], floats), floats)[0])


ARRAYS: Mapping[str, Array] = {
    "matrix": np.arange(6, dtype=np.int32).reshape(2, 3).T,
    "bytes": np.arange(5, dtype=np.uint8),
    "number": np.array(0.5),
    "nothing": np.zeros((0, 4), np.float32),
}


def _arrays_broadcast() -> None:
    is_first, world = dist.get_rank() == 0, dist.group.WORLD
    found = messages.broadcast_arrays(ARRAYS if is_first else None, world)
    assert [*found] == [*ARRAYS]
    for name, array in found.items():
        assert array.dtype == ARRAYS[name].dtype
        np.testing.assert_array_equal(array, ARRAYS[name])
    # The rank that has them holds them once.
    assert np.shares_memory(found["bytes"], ARRAYS["bytes"]) == is_first


def test_arrays_arrive_as_they_were_sent_and_are_copied_on_no_rank(worlds: Worlds) -> None:
    worlds.run(2, _arrays_broadcast)


def test_a_rank_that_is_alone_has_its_own_arrays() -> None:
    assert messages.broadcast_arrays(ARRAYS, None)["bytes"] is ARRAYS["bytes"]


def _arrays_announced(name: str, dtype: str, shape: list[int]) -> None:
    if dist.get_rank() == 0:
        header: Any = [{"name": name, "dtype": dtype, "shape": shape}]
        messages.broadcast_value(header, TypeAdapter(Any), dist.group.WORLD)
        return
    with pytest.raises(BadMessage):
        messages.broadcast_arrays(None, dist.group.WORLD)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param("|O", [2], id="objects"),
        pytest.param("<f8", [2**20, 2**20], id="more than a rank may send"),
        pytest.param("<f8", [-1], id="a negative size"),
    ],
)
def test_arrays_that_no_rank_sends_take_no_memory(worlds: Worlds, dtype: str, shape: list[int]) -> None:
    worlds.run(2, _arrays_announced, "one", dtype, shape)
