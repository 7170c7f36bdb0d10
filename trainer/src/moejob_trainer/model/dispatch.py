"""Dispatch of tokens to the ranks that hold their experts, and combination of the outputs.

A token travels once to each rank that holds any of its experts, not once for each expert: with 8 choices over 4 ranks
these are 3.6 rows instead of 8. Its choices on that rank and their probabilities travel with it; the rank adds up in
float32 what its experts make of the token, and one row returns. For two ranks of two experts each:

    token 0 chose (0, 1), token 1 chose (3, 0)          here, rank 0
    rows to rank 0: token 0 (0, 1), token 1 (0, none)   rows to rank 1: token 1 (none, 1), counted from its own first
    returned:       from rank 0 y0(0) + y1(0) and y0(1), from rank 1 y3(1); each token adds up what came back

Where several ranks share an expert's matrices, each of them works on the rows of all.

Over several nodes tokens are dispatched twice where the groups say so, since the network is slower than NVLink: first
to nodes, each with the experts of all its ranks, and then to the ranks of each node. With 8 choices over two nodes of
four ranks one row of a token crosses the network, instead of 2.6:

    out     token -> the rank of each node that has this rank's place in its own -> each rank of that node
    back    sums of a rank's experts -> their sum over the ranks of the node -> the sum over nodes

Rows travel by an all-to-all, or through memory that ranks of one node write to (`peer_exchange`), where the group has
such memory and the routing fits into it. The host knows the sizes in both cases: without them every tensor in the order
of experts would have the rows of the worst routing, four times those of an even one over four ranks.

The third way (`all_gather_tokens`, `reduce_scatter_tokens`): every rank gathers the tokens of all ranks and picks the
tokens of its own experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from moejob_trainer.distributed.collectives import (
    all_gather,
    all_gather_counts,
    all_gather_uneven,
    all_to_all,
    reduce_scatter,
    reduce_scatter_uneven,
)
from moejob_trainer.distributed.groups import ALONE, Groups
from moejob_trainer.distributed.peer_memory import PeerMemory
from moejob_trainer.layers.destinations import find_destinations, pack_choices
from moejob_trainer.layers.permutation import Permutation, combine_rows, permute_tokens
from moejob_trainer.model.peer_exchange import PeerRoute, peer_places, send_to_peers, sum_from_peers
from moejob_trainer.model.recompute import is_recomputing


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Rows that leave and arrive, by rank, and rows of each rank that shares this one's experts; known to the host."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    shares: tuple[int, ...]
    # Choices among the rows that arrive, of all ranks that share these experts.
    choices: int
    # Rows that arrive at the fullest rank of the group, so that all of its ranks decide alike.
    most: int


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows of tokens that went to the expert group of `groups`, or to those of ranks that share experts."""

    groups: Groups
    sizes: ExchangeSizes
    # Of the tokens that left, over the ranks.
    permutation: Permutation

    def exchange_rows(self, rows: Tensor) -> Tensor:
        """Rows in the order of ranks sent to them, and those that came to all that share this rank's experts."""
        return self.gather_shared_rows(all_to_all(rows, self.sizes.sent, self.sizes.received, self.groups.expert))

    def gather_shared_rows(self, rows: Tensor) -> Tensor:
        """The rows that came here, and to the ranks that share this one's experts."""
        return all_gather_uneven(rows, self.sizes.shares, self.groups.expert_tensor)

    def sum_shared_rows(self, rows: Tensor) -> Tensor:
        """The sums of what the ranks that share experts made of the rows that came here."""
        return reduce_scatter_uneven(rows, self.sizes.shares, self.groups.expert_tensor)

    def return_rows(self, rows: Tensor) -> Tensor:
        """Send received rows back; return the sum of the returning rows for each token."""
        returned_rows = all_to_all(rows, self.sizes.received, self.sizes.sent, self.groups.expert)
        return combine_rows(returned_rows, self.permutation)


@dataclass(frozen=True, slots=True)
class TokenDispatch:
    """Tokens at a rank that holds some of their experts, and the way that they came."""

    # The rows that were sent instead, where `fetch_rows` both moves and permutes them.
    rows: Tensor
    # Counted from this rank's first expert; `experts`, which is none, for those of other ranks. [rows, k]
    chosen: Tensor
    probabilities: Tensor
    sent_to_ranks: SentRows
    # Through the memory of the group, if that is their way.
    route: PeerRoute | None = None
    # To nodes, before they were sent to the ranks of one.
    sent_to_nodes: SentRows | None = None

    @property
    def choice_count(self) -> int:
        """Choices among the rows that are of this rank's experts."""
        return self.sent_to_ranks.sizes.choices

    def fetch_rows(self, rows: Tensor, order: Permutation) -> Tensor:
        """The rows in the order of experts."""
        if self.route is None or not self.route.is_fused:
            return permute_tokens(rows, order)
        return send_to_peers(rows, self.route, order)


@dataclass(frozen=True, slots=True)
class ExpertHolders:
    """The ranks that hold a layer's experts, and the number that each holds."""

    groups: Groups
    experts: int
    # The backward pass reads rows as they arrived.
    keeps_rows: bool = False

    @property
    def can_fuse(self) -> bool:
        """Return whether rows that arrive are needed in the order of experts only."""
        return self.groups.expert_tensor.size == 1 and not self.keeps_rows

    @property
    def node_holders(self) -> ExpertHolders | None:
        """The nodes in place of ranks, where tokens visit them first: each holds the experts of its ranks."""
        across, inside = self.groups.expert_across, self.groups.expert_inside
        return None if across.size == 1 else ExpertHolders(Groups(expert=across), self.experts * inside.size)

    @property
    def in_node(self) -> ExpertHolders:
        """The ranks of this node alone."""
        groups = replace(self.groups, expert=self.groups.expert_inside, expert_across=ALONE, expert_inside=ALONE)
        return replace(self, groups=groups)


def dispatch_tokens(x: Tensor, chosen: Tensor, probabilities: Tensor, holders: ExpertHolders) -> TokenDispatch:
    """Send tokens x [t, h] with their choices and probabilities [t, k] to all ranks that hold their experts."""
    nodes = holders.node_holders
    if nodes is None:
        return _dispatch_to_ranks(x, chosen, probabilities, holders)
    # Choices of other nodes' experts mean none here, and stay none for the ranks of this node.
    node = _dispatch_to_ranks(x, chosen, probabilities, nodes)
    arrived = _dispatch_to_ranks(node.rows, node.chosen, node.probabilities, holders.in_node)
    return replace(arrived, sent_to_nodes=node.sent_to_ranks)


def combine_outputs(y: Tensor, dispatched: TokenDispatch, order: Permutation) -> Tensor:
    """Add up outputs y in the order of experts for each row, send sums back and add up those of each token. [t, h]"""
    rank_sums = _combine_from_ranks(y, dispatched, order)
    return rank_sums if dispatched.sent_to_nodes is None else dispatched.sent_to_nodes.return_rows(rank_sums)


def all_gather_tokens(x: Tensor, groups: Groups) -> Tensor:
    """Gather the rows of all ranks that share experts, each with equally many; gradients are summed."""
    return all_gather(all_gather(x, groups.expert), groups.expert_tensor)


def reduce_scatter_tokens(x: Tensor, groups: Groups) -> Tensor:
    """This rank's share of the rows that `all_gather_tokens` gathered, summed over the ranks."""
    return reduce_scatter(reduce_scatter(x, groups.expert_tensor), groups.expert)


def _dispatch_to_ranks(x: Tensor, chosen: Tensor, probabilities: Tensor, holders: ExpertHolders) -> TokenDispatch:
    groups, experts = holders.groups, holders.experts
    owners, counts = find_destinations(chosen, experts, groups.expert.size)
    all_counts = all_gather_counts(all_gather_counts(counts, groups.expert), groups.expert_tensor)
    sizes = _read_sizes(all_counts, groups)
    permutation = Permutation.from_choices(owners, groups.expert.size, sum(sizes.sent))
    sent_rows = SentRows(groups, sizes, permutation)
    probabilities, local_numbers = sent_rows.exchange_rows(
        pack_choices(chosen, probabilities, permutation, experts)
    ).chunk(2, -1)
    arrived = TokenDispatch(x, local_numbers.detach().long(), probabilities, sent_rows)
    memory = groups.expert_memory
    if memory is None or not _can_use_memory(x, sizes, memory):
        return replace(arrived, rows=sent_rows.exchange_rows(permute_tokens(x, permutation)))
    starts = all_counts[groups.expert_tensor.rank, : groups.expert.rank, 0].sum(0)
    places = peer_places(owners, permutation, starts, memory.row_capacity(x.shape[1], x.dtype))
    route = PeerRoute(memory, places, sum(sizes.received), holders.can_fuse)
    return replace(
        arrived, rows=x if route.is_fused else sent_rows.gather_shared_rows(send_to_peers(x, route)), route=route
    )


def _combine_from_ranks(y: Tensor, dispatched: TokenDispatch, order: Permutation) -> Tensor:
    """For each row that was sent the sum of what the ranks of the group made of it."""
    route, rows = dispatched.route, dispatched.sent_to_ranks
    if route is not None and route.is_fused:
        return sum_from_peers(y, route, order)
    rank_sums = rows.sum_shared_rows(combine_rows(y, order))
    return rows.return_rows(rank_sums) if route is None else sum_from_peers(rank_sums, route)


def _can_use_memory(x: Tensor, sizes: ExchangeSizes, memory: PeerMemory) -> bool:
    rows = memory.row_capacity(x.shape[1], x.dtype)
    if sizes.most > rows and not is_recomputing():
        memory.count_overflow(sizes.most, rows)
    return sizes.most <= rows


def _read_sizes(all_counts: Tensor, groups: Groups) -> ExchangeSizes:
    """Return the sizes behind counts of rows and of choices. [expert tensor, from rank, rows or choices, to rank]"""
    rank = groups.expert.rank
    # The only wait for the GPU in a dispatch: the host needs the sizes, and adds the few numbers itself.
    counts = all_counts.cpu().numpy()
    arriving, rows = counts[..., rank], counts[groups.expert_tensor.rank, :, 0]
    return ExchangeSizes(
        sent=tuple(rows[rank].tolist()),
        received=tuple(rows[:, rank].tolist()),
        shares=tuple(arriving[..., 0].sum(1).tolist()),
        choices=int(arriving[..., 1].sum()),
        most=int(rows.sum(0).max()),
    )
