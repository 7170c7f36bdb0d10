"""Tokens of small layers by all-to-all and through memory that all ranks write to; torchrun starts it on GPUs.

torchrun --nproc-per-node 2 tests/gpu/exchanges.py
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "trainer" / "src"), str(ROOT / "crds" / "src"), str(ROOT / "tests")]

import torch  # noqa: E402 the trainer may lie there unpacked
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from moejob_trainer.distributed.groups import Group, Groups  # noqa: E402
from moejob_trainer.distributed.peer_mapping import FOR_TOKENS, map_peer_memory  # noqa: E402
from moejob_trainer.layers.permutation import Permutation, permute_probabilities  # noqa: E402
from moejob_trainer.model.dispatch import ExpertHolders, combine_outputs, dispatch_tokens  # noqa: E402

WIDTH, CHOICES, HELD = 24, 3, 2
ROW_BYTES = WIDTH * 4
PLENTY = 10**6


@dataclass(frozen=True)
class Way:
    """Tokens of each rank, ranks that share experts, and what else may differ."""

    tokens: tuple[int, ...] = (17, 9)
    sharing: int = 1
    dtype: torch.dtype = torch.float32
    drops: bool = False
    keeps_rows: bool = False
    size_bytes: int = PLENTY
    width: int = WIDTH


@dataclass(frozen=True)
class Seen:
    """Results of one rank: output and gradients, exchanges through the memory, and those that did not fit."""

    results: tuple[Tensor, ...]
    through_memory: int
    overflows: int


def groups_of(sharing: int) -> Groups:
    """The groups of a world in which every `sharing` ranks in a row share experts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if sharing == 1:
        return Groups(expert=Group(rank, size, dist.group.WORLD))
    made = {}
    for members in [
        *(range(first, first + sharing) for first in range(0, size, sharing)),
        *(range(first, size, sharing) for first in range(sharing)),
    ]:
        handle = dist.new_group([*members])
        if rank in members:
            made[members.step] = Group(members.index(rank), len(members), handle)
    return Groups(expert=made[sharing], expert_tensor=made[1])


def both_ways(way: Way, device: str) -> tuple[Seen, Seen]:
    """Two layers, one behind the other, by all-to-all and through memory."""
    groups = groups_of(way.sharing)
    memory = map_peer_memory(way.size_bytes, groups.expert.handle, torch.device(device), FOR_TOKENS)
    return two_layers(way, groups, device), two_layers(way, replace(groups, expert_memory=memory), device)


def two_layers(way: Way, groups: Groups, device: str) -> Seen:
    """One way through two layers, and its gradients."""
    random = torch.Generator().manual_seed(dist.get_rank())
    tokens = way.tokens[dist.get_rank()]
    x = torch.randn(tokens, way.width, generator=random).to(device, way.dtype).requires_grad_()
    probabilities = torch.rand(2, tokens, CHOICES, generator=random).to(device).requires_grad_()
    y, through = x, 0
    for layer in range(2):
        chosen = _choices(tokens, groups, random, drops=way.drops).to(device)
        y, took_memory = _layer(y, chosen, probabilities[layer], way, groups)
        through += took_memory
    upstream = torch.randn(y.shape, generator=random).to(device, way.dtype)
    gradients = torch.autograd.grad(y, [x, probabilities], upstream)
    overflows = 0 if groups.expert_memory is None else groups.expert_memory.overflows
    return Seen(tuple(found.detach().cpu() for found in (y, *gradients)), through, overflows)


def _layer(x: Tensor, chosen: Tensor, probabilities: Tensor, way: Way, groups: Groups) -> tuple[Tensor, int]:
    """Experts that are a number each from 1 to 2, to which ranks that share them add another."""
    sent = dispatch_tokens(x, chosen, probabilities, ExpertHolders(groups, HELD, way.keeps_rows))
    order = Permutation.from_choices(sent.chosen, HELD, sent.choice_count)
    rows = sent.fetch_rows(sent.rows, order)
    weights = permute_probabilities(sent.probabilities, order).unsqueeze(1)
    first, count = HELD * groups.expert.rank, HELD * groups.expert.size
    own = 1 + torch.arange(first, first + HELD, device=x.device) / count
    numbers = own.repeat_interleave(order.bounds.diff(), output_size=len(rows))
    # Only products, and sums whose order is known: every device gives the same bits.
    y = (rows * weights * (numbers.unsqueeze(1) + groups.expert_tensor.rank)).to(x.dtype)
    return combine_outputs(y, sent, order), int(sent.route is not None)


def _choices(tokens: int, groups: Groups, random: torch.Generator, *, drops: bool) -> Tensor:
    experts = HELD * groups.expert.size
    chosen = torch.rand(tokens, experts, generator=random).topk(CHOICES).indices
    return chosen.masked_fill(torch.rand(chosen.shape, generator=random) < 0.3, experts) if drops else chosen


WAYS = {
    "two ranks": Way(),
    "a rank without tokens": Way(tokens=(17, 0)),
    "four ranks": Way(tokens=(5, 8, 13, 3)),
    "bfloat16": Way(dtype=torch.bfloat16),
    "choices dropped": Way(tokens=(5, 8, 13, 3), drops=True),
    "rows kept": Way(keeps_rows=True),
    "experts shared": Way(tokens=(5, 8, 13, 3), sharing=2),
    "experts shared, choices dropped, rows kept": Way(tokens=(5, 8, 13, 3), sharing=2, drops=True, keeps_rows=True),
}
ON_GPUS = {
    "two ranks": Way(),
    "bfloat16": Way(dtype=torch.bfloat16),
    "choices dropped": Way(drops=True),
    "rows kept": Way(keeps_rows=True),
    "rows of a model": Way(tokens=(4096, 3000), dtype=torch.bfloat16, width=2048, size_bytes=2**25),
    "one layer does not fit": Way(drops=True, size_bytes=22 * ROW_BYTES),
}


def main() -> None:
    """Prints, for each way, the exchanges through memory, and by how much results differ, as JSON."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    found = {name: _compared(way) for name, way in ON_GPUS.items()}
    everyones: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, found)
    if dist.get_rank() == 0:
        print(json.dumps(everyones))  # noqa: T201
    dist.destroy_process_group()


def _compared(way: Way) -> list[float]:
    exchanged, written = both_ways(way, "cuda")
    _, on_cpus = both_ways(way, "cpu")
    pairs = [*zip(written.results, exchanged.results, strict=True), *zip(written.results, on_cpus.results, strict=True)]
    return [float(written.through_memory), *(_distance(one, other) for one, other in pairs)]


def _distance(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


if __name__ == "__main__":
    main()
