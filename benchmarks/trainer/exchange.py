"""One layer's exchange of tokens on this machine's GPUs: NCCL's all-to-all beside memory that all of them write to.

    torchrun --nproc-per-node 2 -m benchmarks.trainer.exchange
    torchrun --nproc-per-node 4 -m benchmarks.trainer.exchange --tokens 16384 --experts 128 --choices 8

Random routing, tokens in bfloat16. Prints one JSON line: milliseconds of the slowest GPU, and whether both ways give
the same bits. `out` is everything between tokens and rows in the order of experts; `back` is the way from there.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moejob_trainer.distributed.collectives import all_to_all
from moejob_trainer.distributed.groups import Group, Groups
from moejob_trainer.distributed.peer_mapping import FOR_TOKENS, map_peer_memory
from moejob_trainer.layers.peer_rows import sum_rows, write_rows
from moejob_trainer.layers.permutation import Permutation, combine_rows, permute_tokens
from moejob_trainer.model.dispatch import ExpertHolders, TokenDispatch, combine_outputs, dispatch_tokens
from moejob_trainer.model.peer_exchange import PeerRoute

WARM, REPEATS = 5, 30
Work = Callable[[], object]


@dataclass(frozen=True)
class Layer:
    """The tokens of a layer, sent to their experts in both ways."""

    x: Tensor
    groups: Groups
    by_nccl: TokenDispatch
    by_memory: TokenDispatch
    order: Permutation
    # Stand in for the outputs of experts.
    y: Tensor

    @property
    def route(self) -> PeerRoute:
        """The places of the tokens in the memory of peers."""
        if self.by_memory.route is None:
            raise SystemExit("routing did not fit into the memory of the group; ask for fewer --tokens")
        return self.by_memory.route


def main() -> None:
    """Measure, and print the line."""
    chosen = _parse_arguments()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    with torch.no_grad():
        layer = _build_layer(chosen, _build_groups(chosen, device), device)
        milliseconds, equal = _measure_works(_list_works(layer)), _compare_ways(layer)
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "case": vars(chosen) | {"gpus": dist.get_world_size()},
                    "rows": {"sent": sum(layer.by_nccl.sent_to_ranks.sizes.sent), "ofExperts": layer.order.row_count},
                    "milliseconds": milliseconds,
                    "equal": equal,
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name(),
                }
            )
        )
    dist.destroy_process_group()


def _build_groups(chosen: argparse.Namespace, device: torch.device) -> Groups:
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    # Room for the worst routing.
    memory = map_peer_memory(chosen.tokens * group.size * chosen.width * 2, group.handle, device, FOR_TOKENS)
    if memory is None:
        raise SystemExit("these GPUs do not reach each other's memory, the log says why: there is nothing to measure")
    return Groups(expert=group, expert_memory=memory)


def _build_layer(chosen: argparse.Namespace, groups: Groups, device: torch.device) -> Layer:
    torch.manual_seed(1 + groups.expert.rank)
    x = torch.randn(chosen.tokens, chosen.width, device=device, dtype=torch.bfloat16)
    probabilities, choices = torch.rand(chosen.tokens, chosen.experts, device=device).topk(chosen.choices)
    holders = ExpertHolders(groups, chosen.experts // groups.expert.size)
    by_memory = dispatch_tokens(x, choices, probabilities, holders)
    by_nccl = dispatch_tokens(x, choices, probabilities, replace(holders, groups=replace(groups, expert_memory=None)))
    order = Permutation.from_choices(by_nccl.chosen, holders.experts, by_nccl.choice_count)
    return Layer(x, groups, by_nccl, by_memory, order, permute_tokens(by_nccl.rows, order))


def _list_works(layer: Layer) -> Mapping[str, Work]:
    sizes, group, sent = layer.by_nccl.sent_to_ranks.sizes, layer.groups.expert, layer.by_nccl.sent_to_ranks.permutation
    rows, arrived = permute_tokens(layer.x, sent), layer.by_nccl.rows
    route, shares = layer.route, layer.route.memory.view_as_rows(layer.x.shape[1], layer.x.dtype)
    return {
        "gather for the all-to-all": lambda: permute_tokens(layer.x, sent),
        "all-to-all out": lambda: all_to_all(rows, sizes.sent, sizes.received, group),
        "all-to-all back": lambda: all_to_all(arrived, sizes.received, sizes.sent, group),
        "sum behind the all-to-all": lambda: combine_rows(rows, sent),
        "rows into the order of experts": lambda: permute_tokens(arrived, layer.order),
        "sums of the rows of experts": lambda: combine_rows(layer.y, layer.order),
        "rows written to peers": lambda: write_rows(layer.x, route.places, shares, route.memory.addresses),
        "rows of peers summed": lambda: sum_rows(route.places, shares, route.memory.addresses),
        "barrier": route.memory.barrier,
        "out by all-to-all": lambda: _out_by_nccl(layer),
        "out by memory": lambda: layer.by_memory.fetch_rows(layer.x, layer.order),
        "back by all-to-all": lambda: combine_outputs(layer.y, layer.by_nccl, layer.order),
        "back by memory": lambda: combine_outputs(layer.y, layer.by_memory, layer.order),
    }


def _out_by_nccl(layer: Layer) -> Tensor:
    sent = layer.by_nccl.sent_to_ranks
    return permute_tokens(sent.exchange_rows(permute_tokens(layer.x, sent.permutation)), layer.order)


def _measure_works(works: Mapping[str, Work]) -> dict[str, float]:
    mine = torch.tensor([_time_work(work) for work in works.values()], device="cuda")
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return {name: round(milliseconds, 3) for name, milliseconds in zip(works, mine.tolist(), strict=True)}


def _time_work(work: Work) -> float:
    for _ in range(WARM):
        work()
    torch.cuda.synchronize()
    dist.barrier()
    begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(REPEATS):
        work()
    done.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(done)) / REPEATS


def _compare_ways(layer: Layer) -> dict[str, bool]:
    pairs = {
        "out": (_out_by_nccl(layer), layer.by_memory.fetch_rows(layer.x, layer.order)),
        "back": [combine_outputs(layer.y, sent, layer.order) for sent in (layer.by_nccl, layer.by_memory)],
    }
    mine = torch.tensor(
        [torch.equal(by_nccl, by_memory) for by_nccl, by_memory in pairs.values()], device="cuda", dtype=torch.int32
    )
    dist.all_reduce(mine, op=dist.ReduceOp.MIN)
    return {name: bool(equal) for name, equal in zip(pairs, mine.tolist(), strict=True)}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 16384), ("width", 2048), ("experts", 128), ("choices", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
