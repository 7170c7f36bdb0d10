"""Copies of state on a GPU hold what it was, in locked memory or not."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("megatron.core")
from moejob_trainer.megatron.copy_memory import CopyMemory
from moejob_trainer.megatron.master_weights import PlainNumbers, SplitNumbers, StoredNumbers, split_float32
from moejob_trainer.megatron.state_copies import PART_ELEMENTS, StateCopies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "through parts"])
def test_a_copy_holds_the_state_of_its_beginning(is_locked: bool) -> None:
    gpu = torch.device("cuda", 0)
    numbers = torch.randn(2 * PART_ELEMENTS + 5, device=gpu)
    values: list[StoredNumbers] = [
        SplitNumbers(*split_float32(numbers)),
        PlainNumbers(numbers.bfloat16()),
        PlainNumbers(torch.ones(3, device=gpu)),
    ]
    copies = StateCopies(gpu)
    with patch.object(CopyMemory, "lock_blocks", CopyMemory.lock_blocks if is_locked else lambda _: None):
        copies.prepare_memory(values)
        copies.wait_for_memory()
    made = copies.start_copy(values).make_copies()
    values[1].storage.zero_()
    assert [one.is_pinned() for one in made] == [is_locked] * 3
    assert torch.equal(made[0], values[0].read().cpu())
    assert torch.equal(made[1], numbers.bfloat16().cpu())
    assert made[2].tolist() == [1.0] * 3


def test_locked_memory_is_let_go_of_with_its_owner() -> None:
    gpu = torch.device("cuda", 0)
    values: list[StoredNumbers] = [PlainNumbers(torch.ones(1 << 20, device=gpu))]
    for _ in range(3):
        copies = StateCopies(gpu)
        copies.prepare_memory(values)
        made = copies.start_copy(values).make_copies()
        assert made[0].is_pinned()
        del copies
        # Memory that nothing maps would still be locked.
        assert not made[0].is_pinned()
