"""Weights in bfloat16 and their remainders are float32 numbers, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moejob_trainer.megatron.master_weights import (
    CopiedNumbers,
    PlainNumbers,
    SplitNumbers,
    StoredNumbers,
    copy_to_host,
    join_float32,
    make_master,
    split_float32,
)


def bits(values: Tensor) -> list[int]:
    return [value & 0xFFFFFFFF for value in values.view(torch.int32).tolist()]


def of_bits(*patterns: int) -> Tensor:
    return torch.tensor([pattern - (pattern >> 31 << 32) for pattern in patterns], dtype=torch.int32).view(
        torch.float32
    )


@pytest.mark.parametrize(
    ("master", "weight", "remainder"),
    [
        pytest.param(0x3F80C123, 0x3F81, -0x3EDD, id="the example of the module, rounded up"),
        pytest.param(0x3F804123, 0x3F80, 0x4123, id="rounded down"),
        pytest.param(0xBF80C123, 0xBF81, -0x3EDD, id="rounded away from zero, below it"),
        pytest.param(0x3F808000, 0x3F81, -0x8000, id="half-way, from an even weight"),
        pytest.param(0x3F818000, 0x3F82, -0x8000, id="half-way, from an odd weight"),
        pytest.param(0x3FFFFFFF, 0x4000, -0x0001, id="into the next power of two"),
        pytest.param(0x00000001, 0x0000, 0x0001, id="the smallest number"),
        pytest.param(0x80000000, 0x8000, 0x0000, id="zero below zero"),
        pytest.param(0x7F7FFFFF, 0x7F80, -0x0001, id="beyond the largest weight, which is infinite"),
        pytest.param(0xFF800000, 0xFF80, 0x0000, id="infinity below zero"),
    ],
)
def test_a_number_is_split_and_joined_again(master: int, weight: int, remainder: int) -> None:
    upper, lacking = split_float32(of_bits(master))
    assert int(upper.view(torch.int16).item()) & 0xFFFF == weight
    assert lacking.item() == remainder
    assert bits(join_float32(upper, lacking)) == [master]


@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], ids=hex)
def test_what_is_not_a_number_stays_none(pattern: int) -> None:
    upper, lacking = split_float32(of_bits(pattern))
    assert upper.isnan().all()
    assert join_float32(upper, lacking).isnan().all()


def test_any_bits_come_back_and_weights_are_those_of_torch_but_half_way() -> None:
    drawn = torch.randint(-(2**31), 2**31, (1_000_000,), generator=torch.Generator().manual_seed(1))
    master = drawn.to(torch.int32).view(torch.float32)
    master = master[~master.isnan()]
    upper, lacking = split_float32(master)
    assert torch.equal(join_float32(upper, lacking).view(torch.int32), master.view(torch.int32))
    is_half_way = master.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(upper[~is_half_way], master.to(torch.bfloat16)[~is_half_way])


KINDS: dict[str, Callable[[Tensor], StoredNumbers]] = {
    "weights in float32": lambda numbers: PlainNumbers(numbers.clone()),
    "weights in bfloat16": lambda numbers: SplitNumbers(*split_float32(numbers)),
    "a copy in other memory": lambda numbers: CopiedNumbers(numbers.to(torch.bfloat16), numbers.clone()),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@every_kind
def test_a_part_that_is_written_is_read_in_the_whole(
    kind: Callable[[Tensor], StoredNumbers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moejob_trainer.megatron.master_weights._AT_ONCE", 2)
    numbers = torch.randn(10)
    values = kind(numbers)
    changed = torch.randn(3)
    values.slice_range(2, 5).write(changed)
    assert torch.equal(values.read(), torch.cat([numbers[:2], changed, numbers[5:]]))


@every_kind
def test_a_copy_in_host_memory_is_the_same_however_it_is_cut(
    kind: Callable[[Tensor], StoredNumbers], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = torch.randn(10)
    monkeypatch.setattr("moejob_trainer.megatron.master_weights.UPDATE_ELEMENTS", 4)
    copy = copy_to_host(kind(numbers))
    assert torch.equal(copy, numbers)


def test_the_master_of_weights_is_these_weights() -> None:
    weight = torch.randn(10).to(torch.bfloat16)
    assert torch.equal(make_master(weight).read(), weight.float())


def test_a_type_that_is_no_half_of_float32_is_refused() -> None:
    with pytest.raises(TypeError, match="float16"):
        make_master(torch.zeros(3, dtype=torch.float16))
