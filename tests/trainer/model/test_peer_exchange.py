"""Tokens through memory that all ranks write to, beside the all-to-all: the same numbers to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu.exchanges import ROW_BYTES, WAYS, both_ways
from moejob_trainer.layers.permutation import Permutation
from moejob_trainer.model.peer_exchange import peer_places
from trainer.worlds import Worlds


def test_places_of_tokens_number_the_memory_of_all_ranks_as_one() -> None:
    # Rank 1 of two: tokens 0 and 2 go to rank 0, tokens 1 and 2 to rank 1; rank 0 sends three rows here and one there.
    destinations = torch.tensor([[0, 2], [1, 2], [1, 0]])
    permutation = Permutation.from_choices(destinations, 2, 4)
    places = peer_places(destinations, permutation, torch.tensor([3, 1]), rows=10)
    assert places.tolist() == [[3, -1], [11, -1], [12, 4]]


@pytest.mark.parametrize("name", WAYS)
def test_writing_to_peers_gives_the_bits_of_an_all_to_all(worlds: Worlds, name: str) -> None:
    way = WAYS[name]
    for rank, (exchanged, written) in enumerate(worlds.run(len(way.tokens), both_ways, way, "cpu")):
        assert (exchanged.through_memory, written.through_memory, written.overflows) == (0, 2, 0)
        for one, other in zip(exchanged.results, written.results, strict=True):
            assert torch.equal(one, other), f"rank {rank} differs"
        assert exchanged.results[0].any() or not way.tokens[rank]


@pytest.mark.parametrize(("rows", "fitting"), [(1, 0), (16, 1), (29, 2)])
def test_routing_that_does_not_fit_goes_by_all_to_all_on_every_rank(worlds: Worlds, rows: int, fitting: int) -> None:
    way = replace(WAYS["choices dropped"], size_bytes=rows * ROW_BYTES)
    for exchanged, written in worlds.run(4, both_ways, way, "cpu"):
        assert (written.through_memory, written.overflows) == (fitting, 2 - fitting)
        for one, other in zip(exchanged.results, written.results, strict=True):
            assert torch.equal(one, other)
