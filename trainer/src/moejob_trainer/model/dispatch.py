"""The way of tokens to the ranks that hold their experts, and back.

Rows leave sorted by expert; they arrive as one block from each rank and are put in order of the local experts. Where
several ranks share an expert's matrices, each of them works on the rows of all.

The other way: every rank gathers the tokens of all and picks those of its experts (`of_all`, `own_choices`, `of_own`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moejob_trainer.groups import (
    Groups,
    exchanged,
    gathered,
    gathered_unevenly,
    row_counts,
    scattered,
    scattered_unevenly,
)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows at their experts, and how they got there."""

    rows: Tensor
    probabilities: Tensor
    # Rows of each expert of this rank.
    counts: Tensor
    # From the order of arrival to the order of experts; None where both are the same.
    order: Tensor | None
    sent: tuple[int, ...]
    received: tuple[int, ...]
    shares: tuple[int, ...]


def dispatch(rows: Tensor, probabilities: Tensor, counts: Tensor, groups: Groups) -> Dispatched:
    """Takes rows sorted by expert, with how many each expert of the model gets, to those experts."""
    ranks = groups.expert.size
    local = len(counts) // ranks
    if ranks == 1 and groups.expert_tensor.size == 1:
        return Dispatched(rows, probabilities, counts, None, (), (), ())
    # [expert tensor, from rank, to rank, local expert]
    everyones = row_counts(row_counts(counts, groups.expert), groups.expert_tensor)
    everyones = everyones.view(groups.expert_tensor.size, ranks, ranks, local)
    arriving = everyones[:, :, groups.expert.rank]
    # The one wait for the device: sizes have to be known on the host.
    sent, received, shares = _sizes(everyones, arriving, groups)
    rows = gathered_unevenly(exchanged(rows, sent, received, groups.expert), shares, groups.expert_tensor)
    probabilities = exchanged(probabilities.unsqueeze(-1), sent, received, groups.expert)
    probabilities = gathered_unevenly(probabilities, shares, groups.expert_tensor).squeeze(-1)
    order = _expert_order(arriving.reshape(-1, local))
    return Dispatched(
        rows=rows[order],
        probabilities=probabilities[order],
        counts=arriving.sum((0, 1)),
        order=order,
        sent=sent,
        received=received,
        shares=shares,
    )


def returned(rows: Tensor, sent: Dispatched, groups: Groups) -> Tensor:
    """Takes what the experts made of the rows back to where they came from, in the order they left in."""
    if sent.order is None:
        return rows
    inverse = torch.empty_like(sent.order)
    inverse[sent.order] = torch.arange(len(inverse), device=inverse.device)
    own = scattered_unevenly(rows[inverse], sent.shares, groups.expert_tensor)
    return exchanged(own, sent.received, sent.sent, groups.expert)


def of_all(x: Tensor, groups: Groups) -> Tensor:
    """What all ranks that share experts hold, of which each has equally many rows; gradients are summed."""
    return gathered(gathered(x, groups.expert), groups.expert_tensor)


def own_choices(chosen: Tensor, experts: int, groups: Groups) -> Tensor:
    """The choices that fell on the experts of this rank, counted from its first; `experts`, that is none, for others."""
    own = chosen - groups.expert.rank * experts
    return own.masked_fill((own < 0) | (own > experts), experts)


def of_own(x: Tensor, groups: Groups) -> Tensor:
    """This rank's rows of those that `of_all` gathered, summed over the ranks."""
    return scattered(scattered(x, groups.expert_tensor), groups.expert)


def _sizes(everyones: Tensor, arriving: Tensor, groups: Groups) -> tuple[tuple[int, ...], ...]:
    here = groups.expert_tensor.rank
    sizes = torch.cat(
        [
            everyones[here, groups.expert.rank].sum(-1),
            arriving[here].sum(-1),
            arriving.sum((1, 2)),
        ]
    ).tolist()
    ranks = groups.expert.size
    return tuple(sizes[:ranks]), tuple(sizes[ranks : 2 * ranks]), tuple(sizes[2 * ranks :])


def _expert_order(counts: Tensor) -> Tensor:
    """Rows come in blocks [source, expert]; where each row of the order [expert, source] lies among them."""
    sources, experts = counts.shape
    block = torch.arange(sources * experts, device=counts.device).repeat_interleave(counts.flatten())
    return torch.argsort(block % experts, stable=True)
