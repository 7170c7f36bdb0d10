"""Ranks that reach each other's memory, and the reasons for which they do not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moejob_trainer.distributed.peer_mapping import FOR_TOKENS, map_peer_memory
from moejob_trainer.distributed.peers import PeerPlace, find_obstacle
from trainer.worlds import Worlds

ON_CPUS = PeerPlace("one")
OF_THREE = [PeerPlace("one", name, tuple({"a", "b", "c"} - {name})) for name in "abc"]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        pytest.param([ON_CPUS, ON_CPUS], "", id="processes of one machine"),
        pytest.param(OF_THREE, "", id="GPUs that all reach each other"),
        pytest.param([ON_CPUS, PeerPlace("two"), ON_CPUS], "3 ranks lie on 2 nodes", id="two machines"),
        pytest.param(
            [OF_THREE[0], replace(OF_THREE[1], reached=("c",)), OF_THREE[2]],
            "rank 1 of it cannot reach the memory of rank 0",
            id="a GPU that does not reach another",
        ),
        pytest.param([OF_THREE[0], OF_THREE[0]], "2 ranks share 1 GPUs", id="two ranks on a GPU"),
    ],
)
def test_ranks_write_to_each_other_only_where_all_of_them_reach_all(places: list[PeerPlace], expected: str) -> None:
    assert re.search(expected, find_obstacle(places))
    assert bool(find_obstacle(places)) == bool(expected)


def mapped(size_bytes: int) -> tuple[list[float], int]:
    """The first number of each rank's share as this rank sees it, and the rows of three that a share has room for."""
    handle = dist.group.WORLD
    memory = map_peer_memory(size_bytes, handle, torch.device("cpu"), FOR_TOKENS)
    assert memory is not None
    shares = memory.view_as_rows(3, torch.bfloat16)
    memory.barrier()
    # Each rank writes to the one behind it.
    shares[(memory.rank + 1) % len(shares)][0] = memory.rank
    memory.barrier()
    return [share[0, 2].item() for share in shares], memory.row_capacity(3, torch.bfloat16)


def test_what_one_rank_writes_all_ranks_read(worlds: Worlds) -> None:
    assert worlds.run(3, mapped, 100) == [([2.0, 0.0, 1.0], 16)] * 3


def test_a_rank_that_is_alone_has_no_peers() -> None:
    assert map_peer_memory(100, None, torch.device("cpu"), FOR_TOKENS) is None
