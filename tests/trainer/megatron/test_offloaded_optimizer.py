"""The share of the optimizer's state in host memory: as near to what was asked for as whole pieces come."""

from __future__ import annotations

import pytest
import torch
from torch.optim.adamw import adamw

from moejob_trainer.megatron.host_update import HostBuffers, HostUpdate, Numbers, UpdateChunk
from moejob_trainer.megatron.optimizer import choose_host_shards


@pytest.mark.parametrize(
    ("sizes", "share", "moved"),
    [
        pytest.param([8, 4, 2, 2], 0.0, [], id="none"),
        pytest.param([8, 4, 2, 2], 1.0, [0, 1, 2, 3], id="all"),
        pytest.param([8, 4, 2, 2], 0.5, [0], id="half"),
        pytest.param([2, 8, 2, 4], 0.375, [0, 3], id="what does not fit is passed over"),
        pytest.param([8, 4, 2, 3], 0.01, [2], id="a small share moves the smallest"),
        pytest.param([], 0.5, [], id="a rank without pieces"),
    ],
)
def test_pieces_that_are_moved(sizes: list[int], share: float, moved: list[int]) -> None:
    assert sorted(choose_host_shards(sizes, share)) == moved


RATE, SCALE, CHUNK = 1e-3, 0.5, 7


def moved_by_hand(piece: UpdateChunk, scale: float) -> tuple[torch.Tensor, ...]:
    """Return weights, main weights and moments after one AdamW step of these, all elements at once."""
    main, first, second = (one.float().clone() for one in (piece.main, piece.first_moment, piece.second_moment))
    gradient = piece.gradient.float() * scale
    first = 0.9 * first + 0.1 * gradient
    second = 0.95 * second + 0.05 * gradient**2
    decayed = main * (1 - RATE * 0.1) if piece.is_decayed else main
    main = decayed - RATE * (first / 0.1) / ((second / 0.05).sqrt() + 1e-8)
    kept = piece.first_moment.dtype
    return main.to(piece.weight.dtype), main, first.to(kept), second.to(kept)


def step(numbers: Numbers, is_decayed: bool) -> None:
    main, gradient, first, second = numbers
    adamw(
        [main],
        [gradient],
        [first],
        [second],
        [],
        [torch.tensor(0.0)],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=RATE,
        weight_decay=0.1 if is_decayed else 0.0,
        eps=1e-8,
        maximize=False,
    )


def piece(elements: int, moments: torch.dtype, *, is_decayed: bool) -> UpdateChunk:
    main, gradient = torch.randn(elements), torch.randn(elements).bfloat16()
    kept = (torch.randn(elements).to(moments), torch.rand(elements).to(moments))
    return UpdateChunk(main.bfloat16(), gradient, main, *kept, is_decayed)


@pytest.mark.parametrize("overlaps_copies", [True, False])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_a_piece_is_updated_in_chunks_as_it_would_be_whole(moments: torch.dtype, overlaps_copies: bool) -> None:
    torch.manual_seed(1)
    sizes = {3: True, CHUNK: False, 5 * CHUNK + 2: True, 1: False}
    pieces = [piece(elements, moments, is_decayed=is_decayed) for elements, is_decayed in sizes.items()]
    expected = [moved_by_hand(one, SCALE) for one in pieces]

    HostUpdate(overlaps_copies=overlaps_copies, elements=CHUNK).update(pieces, SCALE, step)

    for one, numbers in zip(pieces, expected, strict=True):
        found = (one.weight, one.main, one.first_moment, one.second_moment)
        for mine, by_hand in zip(found, numbers, strict=True):
            torch.testing.assert_close(
                mine.float(), by_hand.float(), rtol=1e-2 if mine.dtype == torch.bfloat16 else 1e-5, atol=1e-6
            )
        assert torch.equal(one.weight, one.main.bfloat16())


@pytest.mark.parametrize(
    ("overlaps_copies", "fetched_by_then"),
    [
        pytest.param(True, [2, 3, 3], id="one chunk ahead"),
        pytest.param(False, [1, 2, 3], id="none ahead"),
    ],
)
def test_gradients_of_the_next_chunk_come_while_one_is_updated(
    overlaps_copies: bool, fetched_by_then: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[UpdateChunk] = []
    seen: list[int] = []
    fetch = HostBuffers.fetch

    def noted(buffers: HostBuffers, chunk: UpdateChunk, scale: float) -> None:
        fetched.append(chunk)
        fetch(buffers, chunk, scale)

    monkeypatch.setattr(HostBuffers, "fetch", noted)
    HostUpdate(overlaps_copies=overlaps_copies, elements=CHUNK).update(
        [piece(3 * CHUNK, torch.float32, is_decayed=True)], SCALE, lambda *_: seen.append(len(fetched))
    )
    assert seen == fetched_by_then


def test_a_rank_without_pieces_on_the_host_needs_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(HostBuffers, "__init__", lambda *of: made.append(of))
    HostUpdate(overlaps_copies=True).update([], SCALE, step)
    assert made == []
