"""Messages between ranks: they arrive as they were sent, and what a peer sends runs no code here."""

from __future__ import annotations

import os
import pickle
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
from moejob_trainer.distributed.encoding import INTEGER, TEXT, BadMessage, decoded, encoded, packed, unpacked
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
    assert messages.all_gather(_report(rank), REPORT, world) == expected
    assert messages.gather(_report(rank), REPORT, world) == (expected if rank == 0 else None)
    assert messages.broadcast(_report(rank), REPORT, world, source=1) == expected[1]
    assert messages.broadcast_bytes(b"" if rank == 0 else None, world) == b""
    assert messages.gather_bytes(b"a" * rank, world) == ([b"", b"a"] if rank == 0 else None)
    messages.barrier(world)


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
        messages.all_gather("fine", TEXT, dist.group.WORLD)


def test_a_pickle_of_a_peer_is_refused_and_runs_nothing(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "code-ran"
    worlds.run(2, _attacked, str(path))
    assert not path.exists()


def _announced() -> None:
    if dist.get_rank() == 1:
        dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([2**60]))
        return
    with pytest.raises(BadMessage, match=str(2**60)):
        messages.all_gather("fine", TEXT, dist.group.WORLD)


def test_a_size_beyond_the_bound_takes_no_memory(worlds: Worlds) -> None:
    worlds.run(2, _announced)


def _mistaken() -> None:
    wrong: Any = "no number" if dist.get_rank() == 0 else None
    with pytest.raises(BadMessage):
        messages.broadcast(wrong, INTEGER, dist.group.WORLD)


def test_a_value_of_another_type_fails_on_every_rank_alike(worlds: Worlds) -> None:
    worlds.run(2, _mistaken)


def test_a_measurement_that_is_no_number_arrives_as_that() -> None:
    floats = TypeAdapter(list[float])
    assert isnan(decoded(encoded([float("nan")], floats), floats)[0])


def test_arrays_travel_as_bytes_that_are_checked() -> None:
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3).T, "b": np.array([0.5])}
    data = packed(arrays)
    for name, array in unpacked(data).items():
        np.testing.assert_array_equal(array, arrays[name])
    for broken in (
        data[:-1],
        data + b"\0",
        data[:4],
        data.replace(b'"I32"', b'"O64"'),
        data.replace(b"[3,2]", b"[9,9]"),
    ):
        assert broken != data
        with pytest.raises(BadMessage):
            unpacked(broken)
