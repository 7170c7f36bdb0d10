"""A save whose copies leave beside the training holds the state as it was when the save began."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from builders import merge_sections
from moejob_api.models.shape import Family
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.megatron import copy_memory, state_copies
from moejob_trainer.megatron.copy_memory import CopyMemory, CopySize
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.master_weights import PlainNumbers, SplitNumbers, split_float32
from moejob_trainer.megatron.state import StateFiles
from moejob_trainer.megatron.state_copies import StateCopies
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from trainer.parity.cells import Cell, make_loss, micro_batches, start_engine
from trainer.parity.checkpoints import state_in, unequal_names
from trainer.worlds import Worlds

CPU = torch.device("cpu")
BFLOAT16 = {"model": {"dtype": "bfloat16"}}
CELLS: dict[str, tuple[Family, dict[str, Any]]] = {
    "ZeRO-1": (Family.QWEN3_MOE, {"parallelism": {"expert": 2, "data": 2}}),
    "FSDP": (Family.QWEN3_MOE, {"parallelism": {"data": 2}, "memory": {"sharding": "FSDP"}}),
    "weights and remainders": (Family.QWEN3_MOE, merge_sections(BFLOAT16, {"parallelism": {"data": 2}})),
    "a bias that moves": (Family.DEEPSEEK_V3, {"moe": {"balancing": "ExpertBias"}}),
}


class Held(Executor):
    """Runs what it is given after `release`, on a thread of its own."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._worker = ThreadPoolExecutor(1)

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        def later() -> Any:
            self._released.wait()
            return work(*args, **named)

        return self._worker.submit(later)

    def release(self) -> None:
        self._released.set()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.release()
        self._worker.shutdown(wait, cancel_futures=cancel_futures)


@pytest.mark.parametrize("name", CELLS)
def test_an_update_waits_for_the_copies_of_a_save_that_began_before_it(
    worlds: Worlds, reference: Any, tmp_path: Path, name: str
) -> None:
    at_once, beside = _saves(worlds, reference, tmp_path, name, waits=True)
    assert unequal_names(state_in(beside), state_in(at_once)) == []


def test_an_update_that_did_not_wait_would_be_seen(worlds: Worlds, reference: Any, tmp_path: Path) -> None:
    at_once, beside = _saves(worlds, reference, tmp_path, "a bias that moves", waits=False)
    kinds = {kind for kind, _ in unequal_names(state_in(beside), state_in(at_once))}
    assert kinds == {"weight", "firstMoment", "secondMoment"}


def _saves(worlds: Worlds, reference: Any, tmp_path: Path, name: str, *, waits: bool) -> tuple[Path, Path]:
    family, sections = CELLS[name]
    folder, _ = reference(family)
    cell, at_once, beside = Cell(family, sections), tmp_path / "at-once", tmp_path / "beside"
    for path in (at_once, beside):
        path.mkdir()
    assert worlds.run(cell.ranks(), saved_twice, cell, folder, at_once, beside, waits) == [waits] * cell.ranks()
    return at_once, beside


def saved_twice(cell: Cell, first: Path, at_once: Path, beside: Path, waits: bool) -> bool:
    """Save at once, and again while the next update has begun; return whether that has waited."""
    use_cpu()
    engine = start_engine(cell, first)
    try:
        _update(cell, engine, 0)
        with ThreadPoolExecutor(1) as background:
            _files(engine, background).start_writing(at_once).writing.result()
        with Held() as held:
            pending, finish = _files(engine, held).start_writing(beside), engine.copies.finish_copy

            def released() -> None:
                if waits:
                    held.release()
                    finish()

            with patch.object(engine.copies, "finish_copy", released):
                _update(cell, engine, 1)
        pending.writing.result()
        return pending.waited_seconds > 0.0
    finally:
        stop_groups()


def _files(engine: MegatronTrainingEngine, background: Executor) -> StateFiles:
    return StateFiles(engine, build_tensor_table(engine.model.shape).parameters, background)


def _update(cell: Cell, engine: MegatronTrainingEngine, step: int) -> None:
    engine.update(micro_batches(cell, engine, step), make_loss(cell, engine))


def test_an_update_goes_on_beside_a_save_whose_file_cannot_be_written(
    worlds: Worlds, reference: Any, tmp_path: Path
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    assert worlds.run(1, updated_beside, Cell(Family.QWEN3_MOE, {}), folder, tmp_path / "nowhere") == [True]


def updated_beside(cell: Cell, first: Path, nowhere: Path) -> bool:
    """Update beside a save into a folder that is not there; return whether the save has failed."""
    use_cpu()
    engine = start_engine(cell, first)
    try:
        with ThreadPoolExecutor(1) as background:
            pending = _files(engine, background).start_writing(nowhere)
            _update(cell, engine, 0)
            return isinstance(pending.writing.exception(), FileNotFoundError)
    finally:
        stop_groups()


def test_a_save_that_training_waits_for_is_the_same_and_copies_nothing_ahead(
    worlds: Worlds, reference: Any, tmp_path: Path
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    for name, is_asynchronous in (("copied", True), ("awaited", False)):
        (tmp_path / name).mkdir()
        sections = merge_sections(BFLOAT16, {"parallelism": {"data": 2}, "checkpoint": {"async": is_asynchronous}})
        copied = worlds.run(2, saved_once, Cell(Family.QWEN3_MOE, sections), folder, tmp_path / name)
        assert copied == [is_asynchronous] * 2
    assert unequal_names(state_in(tmp_path / "awaited"), state_in(tmp_path / "copied")) == []


def saved_once(cell: Cell, first: Path, folder: Path) -> bool:
    """Save after an update; return whether a copy of the state was made."""
    use_cpu()
    engine = start_engine(cell, first)
    try:
        _update(cell, engine, 0)
        with ThreadPoolExecutor(1) as background:
            pending = _files(engine, background).start_writing(folder)
            pending.writing.result()
        return pending.copy is not None
    finally:
        stop_groups()


@pytest.mark.parametrize("elements", [1, 3, 4, 100])
def test_a_copy_is_the_same_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(state_copies, "PART_ELEMENTS", elements)
    numbers, moments = torch.randn(10), torch.randn(7).bfloat16()
    made = (
        StateCopies(CPU)
        .start_copy([SplitNumbers(*split_float32(numbers)), PlainNumbers(moments), PlainNumbers(torch.empty(0))])
        .make_copies()
    )
    assert [_bits(copy) for copy in made] == [_bits(numbers), _bits(moments), []]


def test_a_copy_that_fails_ends_the_wait_for_it() -> None:
    copies = StateCopies(CPU)
    copy = copies.start_copy([SplitNumbers(torch.zeros(2), torch.zeros(3))])
    with pytest.raises(RuntimeError):
        copy.make_copies()
    copies.finish_copy()


def test_a_second_copy_lies_where_the_first_did_and_is_of_the_values_of_its_time() -> None:
    copies, numbers = StateCopies(CPU), torch.ones(3)
    first = copies.start_copy([PlainNumbers(numbers)]).make_copies()
    numbers += 1
    second = copies.start_copy([PlainNumbers(numbers)]).make_copies()
    assert [copy.data_ptr() for copy in first] == [copy.data_ptr() for copy in second]
    assert torch.equal(second[0], torch.full((3,), 2.0))
    assert copies.start_copy([PlainNumbers(torch.zeros(4))]).make_copies()[0].shape == (4,)


def test_a_copy_lies_in_the_memory_that_was_prepared_for_it() -> None:
    copies, values = StateCopies(CPU), [PlainNumbers(torch.ones(3)), PlainNumbers(torch.ones(5).bfloat16())]
    copies.prepare_memory(values)
    made = copies.start_copy(values).make_copies()
    copies.prepare_memory(values)
    copies.wait_for_memory()
    assert [copy.tolist() for copy in made] == [[1.0] * 3, [1.0] * 5], "prepared again beside a copy"
    assert [copy.data_ptr() for copy in copies.start_copy(values).make_copies()] == [copy.data_ptr() for copy in made]


def test_copies_begin_where_no_other_ends_in_blocks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_memory, "BLOCK_BYTES", 256)
    sizes = [CopySize(elements, dtype) for elements in (0, 1, 31, 33, 200) for dtype in (torch.float32, torch.bfloat16)]
    memory = CopyMemory(sizes, CPU)
    for number, copy in enumerate(memory.copies):
        copy.fill_(number)
    assert [copy.tolist() for copy in memory.copies] == [[n] * size.elements for n, size in enumerate(sizes)]
    assert all(copy.data_ptr() % 64 == 0 for copy in memory.copies if copy.numel())
    blocks = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in memory.copies}
    assert len(blocks) == 4
    assert sum(blocks.values()) == sum(size.aligned_bytes for size in sizes)


def test_memory_is_taken_once_and_waited_for() -> None:
    memory = CopyMemory([CopySize(1000, torch.float32)], CPU)
    memory.copies[0].fill_(1.0)
    memory.wait()
    assert memory.copies[0].sum() == 1000.0
    memory.start_allocation()
    memory.wait()
    memory.wait()
    assert memory.copies[0].sum() == 0.0


def test_a_second_copy_waits_for_the_first() -> None:
    copies, order = StateCopies(CPU), list[str]()
    first = copies.start_copy([PlainNumbers(torch.zeros(1))])

    def second() -> None:
        copies.start_copy([PlainNumbers(torch.zeros(1))])
        order.append("second begun")

    waiting = threading.Thread(target=second)
    waiting.start()
    order.append("first made")
    first.make_copies()
    waiting.join()
    assert order == ["first made", "second begun"]


def _bits(numbers: Tensor) -> list[float]:
    return numbers.view(torch.uint8).tolist()
