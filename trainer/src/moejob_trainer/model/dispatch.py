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

The third way (`all_gather_tokens`, `reduce_scatter_tokens`): every rank gathers the tokens of all and picks those of
its own experts.
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
from moejob_trainer.layers.destinations import choices_sent, destinations
from moejob_trainer.layers.permutation import Permutation, combined, permuted
from moejob_trainer.model.peer_exchange import PeerRoute, peer_places, sent_to_peers, summed_from_peers
from moejob_trainer.model.recompute import computes_again


@dataclass(frozen=True, slots=True)
class Sizes:
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
    sizes: Sizes
    # Of the tokens that left, over the ranks.
    permutation: Permutation

    def exchanged(self, rows: Tensor) -> Tensor:
        """Rows in the order of ranks sent to them, and those that came to all that share this rank's experts."""
        return self.shared(all_to_all(rows, self.sizes.sent, self.sizes.received, self.groups.expert))

    def shared(self, rows: Tensor) -> Tensor:
        """The rows that came here, and to the ranks that share this one's experts."""
        return all_gather_uneven(rows, self.sizes.shares, self.groups.expert_tensor)

    def summed(self, rows: Tensor) -> Tensor:
        """The sums of what the ranks that share experts made of the rows that came here."""
        return reduce_scatter_uneven(rows, self.sizes.shares, self.groups.expert_tensor)

    def returned(self, rows: Tensor) -> Tensor:
        """Rows that came here sent back, and for each token the sum of those that return."""
        back = all_to_all(rows, self.sizes.received, self.sizes.sent, self.groups.expert)
        return combined(back, self.permutation)


@dataclass(frozen=True, slots=True)
class TokenDispatch:
    """Tokens at a rank that holds some of their experts, and the way that they came."""

    # The rows that were sent instead, where `fetch` both moves and permutes them.
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
    def choices(self) -> int:
        """Choices among the rows that are of this rank's experts."""
        return self.sent_to_ranks.sizes.choices

    def fetch(self, rows: Tensor, order: Permutation) -> Tensor:
        """The rows in the order of experts."""
        if self.route is None or not self.route.is_fused:
            return permuted(rows, order)
        return sent_to_peers(rows, self.route, order)


@dataclass(frozen=True, slots=True)
class ExpertHolders:
    """The ranks that hold a layer's experts, and the number that each holds."""

    groups: Groups
    experts: int
    # The backward pass reads rows as they arrived.
    keeps_rows: bool = False

    @property
    def fuses(self) -> bool:
        """Return whether rows that arrive are needed in the order of experts only."""
        return self.groups.expert_tensor.size == 1 and not self.keeps_rows

    @property
    def nodes(self) -> ExpertHolders | None:
        """The nodes in place of ranks, where tokens visit them first: each holds the experts of its ranks."""
        across, inside = self.groups.expert_across, self.groups.expert_inside
        return None if across.size == 1 else ExpertHolders(Groups(expert=across), self.experts * inside.size)

    @property
    def in_node(self) -> ExpertHolders:
        """The ranks of this node alone."""
        groups = replace(self.groups, expert=self.groups.expert_inside, expert_across=ALONE, expert_inside=ALONE)
        return replace(self, groups=groups)


def dispatch(x: Tensor, chosen: Tensor, probabilities: Tensor, holders: ExpertHolders) -> TokenDispatch:
    """Send tokens x [t, h] with their choices and probabilities [t, k] to all ranks that hold their experts."""
    nodes = holders.nodes
    if nodes is None:
        return _dispatched(x, chosen, probabilities, holders)
    # Choices of other nodes' experts mean none here, and stay none for the ranks of this node.
    node = _dispatched(x, chosen, probabilities, nodes)
    arrived = _dispatched(node.rows, node.chosen, node.probabilities, holders.in_node)
    return replace(arrived, sent_to_nodes=node.sent_to_ranks)


def combine(y: Tensor, sent: TokenDispatch, order: Permutation) -> Tensor:
    """Add up outputs y in the order of experts for each row, send sums back and add up those of each token. [t, h]"""
    own = _combined(y, sent, order)
    return own if sent.sent_to_nodes is None else sent.sent_to_nodes.returned(own)


def all_gather_tokens(x: Tensor, groups: Groups) -> Tensor:
    """Gather the rows of all ranks that share experts, each with equally many; gradients are summed."""
    return all_gather(all_gather(x, groups.expert), groups.expert_tensor)


def reduce_scatter_tokens(x: Tensor, groups: Groups) -> Tensor:
    """This rank's rows of those that `all_gather_tokens` gathered, summed over the ranks."""
    return reduce_scatter(reduce_scatter(x, groups.expert_tensor), groups.expert)


def _dispatched(x: Tensor, chosen: Tensor, probabilities: Tensor, holders: ExpertHolders) -> TokenDispatch:
    groups, experts = holders.groups, holders.experts
    owners, counts = destinations(chosen, experts, groups.expert.size)
    everyones = all_gather_counts(all_gather_counts(counts, groups.expert), groups.expert_tensor)
    sizes = _sizes(everyones, groups)
    permutation = Permutation.of(owners, groups.expert.size, sum(sizes.sent))
    sent = SentRows(groups, sizes, permutation)
    probabilities, here = sent.exchanged(choices_sent(chosen, probabilities, permutation, experts)).chunk(2, -1)
    arrived = TokenDispatch(x, here.detach().long(), probabilities, sent)
    memory = groups.expert_memory
    if memory is None or not _fits(x, sizes, memory):
        return replace(arrived, rows=sent.exchanged(permuted(x, permutation)))
    starts = everyones[groups.expert_tensor.rank, : groups.expert.rank, 0].sum(0)
    places = peer_places(owners, permutation, starts, memory.rows(x.shape[1], x.dtype))
    route = PeerRoute(memory, places, sum(sizes.received), holders.fuses)
    return replace(arrived, rows=x if route.is_fused else sent.shared(sent_to_peers(x, route)), route=route)


def _combined(y: Tensor, sent: TokenDispatch, order: Permutation) -> Tensor:
    """For each row that was sent the sum of what the ranks of the group made of it."""
    route, rows = sent.route, sent.sent_to_ranks
    if route is not None and route.is_fused:
        return summed_from_peers(y, route, order)
    own = rows.summed(combined(y, order))
    return rows.returned(own) if route is None else summed_from_peers(own, route)


def _fits(x: Tensor, sizes: Sizes, memory: PeerMemory) -> bool:
    rows = memory.rows(x.shape[1], x.dtype)
    if sizes.most > rows and not computes_again():
        memory.count_overflow(sizes.most, rows)
    return sizes.most <= rows


def _sizes(everyones: Tensor, groups: Groups) -> Sizes:
    """Return the sizes behind counts of rows and of choices. [expert tensor, from rank, rows or choices, to rank]"""
    rank = groups.expert.rank
    # The only wait for the GPU in a dispatch: the host needs the sizes, and adds the few numbers itself.
    counts = everyones.cpu().numpy()
    arriving, rows = counts[..., rank], counts[groups.expert_tensor.rank, :, 0]
    return Sizes(
        sent=tuple(rows[rank].tolist()),
        received=tuple(rows[:, rank].tolist()),
        shares=tuple(arriving[..., 0].sum(1).tolist()),
        choices=int(arriving[..., 1].sum()),
        most=int(rows.sum(0).max()),
    )
