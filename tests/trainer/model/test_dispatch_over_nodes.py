"""Tokens that visit nodes first, beside those that go straight to ranks: the same sums of fewer rows in the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpu.exchanges import CHOICES, HELD, PLENTY, WIDTH, Seen, Way, two_layers
from moejob_api.job.moe import DispatcherKind
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.layout.sizes import Layout, derive_layout
from moejob_trainer.distributed.groups import ALONE, Groups
from moejob_trainer.distributed.peer_mapping import FOR_TOKENS, map_peer_memory
from moejob_trainer.layers.permutation import Permutation
from moejob_trainer.megatron.topology import start_groups, stop_groups
from moejob_trainer.model.dispatch import ExpertHolders, combine_outputs, dispatch_tokens
from trainer.worlds import Worlds

TOKENS = (5, 8, 13, 3)
# Of two ranks, or of four where two share experts.
TWO_NODES = derive_layout(Parallelism(expert=4), 2)
TWO_NODES_SHARING = derive_layout(
    Parallelism(tensor=2, data=4, expert=4, expert_tensor=2, expert_layout=ExpertLayout.FOLDED), 4
)
WAYS = {
    "two nodes": Way(tokens=TOKENS),
    "ranks and a node without tokens": Way(tokens=(17, 9, 0, 0)),
    "bfloat16": Way(tokens=TOKENS, dtype=torch.bfloat16),
    "choices dropped": Way(tokens=TOKENS, drops=True),
    "rows kept": Way(tokens=TOKENS, keeps_rows=True),
    "experts shared, choices dropped": Way(tokens=(*TOKENS, 7, 0, 11, 4), sharing=2, drops=True),
}


def by_all_ways(way: Way) -> tuple[Seen, Seen, Seen]:
    """Two layers straight to ranks, over nodes by all-to-all, and over nodes with memory inside each."""
    with _groups(TWO_NODES if way.sharing == 1 else TWO_NODES_SHARING) as groups:
        memory = map_peer_memory(way.size_bytes, groups.expert_inside.handle, torch.device("cpu"), FOR_TOKENS)
        each = _straight(groups), groups, replace(groups, expert_memory=memory)
        straight, exchanged, written = (two_layers(way, one, "cpu") for one in each)
        return straight, exchanged, written


@contextmanager
def _groups(sizes: Layout) -> Iterator[Groups]:
    try:
        yield start_groups(sizes, DispatcherKind.FLEX)
    finally:
        stop_groups()


def _straight(groups: Groups) -> Groups:
    return replace(groups, expert_across=ALONE, expert_inside=ALONE)


@pytest.mark.parametrize("name", WAYS)
def test_nodes_first_gives_the_sums_of_an_all_to_all(worlds: Worlds, name: str) -> None:
    way = WAYS[name]
    rounding = 0.03 if way.dtype is torch.bfloat16 else 1e-6
    for rank, (straight, exchanged, written) in enumerate(worlds.run(len(way.tokens), by_all_ways, way)):
        assert (straight.through_memory, exchanged.through_memory, written.through_memory) == (0, 0, 2)
        for one, other, same in zip(straight.results, exchanged.results, written.results, strict=True):
            torch.testing.assert_close(one, other, rtol=rounding, atol=rounding * 10)
            assert torch.equal(other, same), f"memory changes the sums of rank {rank}"
        assert straight.results[0].any() or not way.tokens[rank]


@dataclass(frozen=True)
class Crossings:
    """Rows of tokens that one rank sends to other nodes, out and back, and what its choices need."""

    out: int
    back: int
    nodes: int
    ranks: int


def crossings(sizes: Layout, tokens: int, way: str) -> Crossings:
    """Send the tokens of one rank and bring them back."""
    random = torch.Generator().manual_seed(dist.get_rank())
    node = dist.get_rank() // sizes.gpus_per_pod
    with _groups(sizes) as groups:
        chosen = torch.rand(tokens, HELD * groups.expert.size, generator=random).topk(CHOICES).indices
        holders = ExpertHolders(_straight(groups) if way == "straight" else groups, HELD)
        with _counting(sizes) as out:
            sent = dispatch_tokens(torch.ones(tokens, WIDTH), chosen, torch.ones(chosen.shape), holders)
        order = Permutation.from_choices(sent.chosen, HELD, sent.choice_count)
        with _counting(sizes) as back:
            combine_outputs(sent.fetch_rows(sent.rows, order), sent, order)
    ranks = [{*row} for row in (chosen // HELD).tolist()]
    elsewhere = [{rank for rank in of_token if rank // sizes.gpus_per_pod != node} for of_token in ranks]
    nodes = sum(len({rank // sizes.gpus_per_pod for rank in of_token}) for of_token in elsewhere)
    return Crossings(sum(out), sum(back), nodes, sum(map(len, elsewhere)))


@contextmanager
def _counting(sizes: Layout) -> Iterator[list[int]]:
    """Rows as wide as a token that this rank sends to other nodes, exchange by exchange."""
    found: list[int] = []
    exchange = dist.all_to_all_single

    def counted(into: Any, rows: Any, received: list[int], sent: list[int], group: Any) -> Any:
        nodes = [rank // sizes.gpus_per_pod for rank in dist.get_process_group_ranks(group)]
        here = dist.get_rank() // sizes.gpus_per_pod
        if rows.shape[1] == WIDTH:
            found.append(sum(count for count, node in zip(sent, nodes, strict=True) if node != here))
        return exchange(into, rows, received, sent, group=group)

    with patch.object(dist, "all_to_all_single", counted):
        yield found


def test_one_row_crosses_the_network_for_each_token_and_other_node(worlds: Worlds) -> None:
    found = worlds.run(4, crossings, TWO_NODES, 40, "over nodes")
    assert [rank.out for rank in found] == [rank.nodes for rank in found]
    # The rows that a rank returns are those that others sent.
    assert sum(rank.back for rank in found) == sum(rank.nodes for rank in found)
    assert all(0 < rank.nodes < rank.ranks for rank in found)


def test_straight_to_ranks_one_row_crosses_for_each_token_and_rank_elsewhere(worlds: Worlds) -> None:
    found = worlds.run(4, crossings, TWO_NODES, 40, "straight")
    assert [rank.out for rank in found] == [rank.ranks for rank in found]
    assert sum(rank.back for rank in found) == sum(rank.ranks for rank in found)


@pytest.mark.parametrize(("rows", "fitting"), [(1, 0), (PLENTY, 2)])
def test_routing_that_does_not_fit_goes_by_all_to_all_inside_the_node(worlds: Worlds, rows: int, fitting: int) -> None:
    way = replace(WAYS["choices dropped"], size_bytes=min(PLENTY, rows * WIDTH * 4))
    for _, exchanged, written in worlds.run(4, by_all_ways, way):
        assert (written.through_memory, written.overflows) == (fitting, 2 - fitting)
        for one, other in zip(exchanged.results, written.results, strict=True):
            assert torch.equal(one, other)
