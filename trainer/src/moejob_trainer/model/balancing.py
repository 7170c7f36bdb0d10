"""What keeps experts evenly loaded: losses on the router, a bias on the choice, and the counts both live on.

A balancing loss is attached to the probabilities that go on through the model, so that its gradient meets theirs
whatever stage of the pipeline this is; it never appears in the loss of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from moejob_api.job.moe import Balancing, MoE
from moejob_trainer.groups import Groups, total
from moejob_trainer.layers.routing import (
    Routing,
    balancing_scores,
    document_counts,
    routing_entropy,
    sequence_loss,
    switch_loss,
    z_loss,
)
from moejob_trainer.model.recompute import computes_again
from moejob_trainer.model.row import Row

_WITH_LOSS = (Balancing.AUX_LOSS, Balancing.SEQ_AUX_LOSS, Balancing.GLOBAL_AUX_LOSS)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """What an update is made of. A turn is the micro batches that data ranks work on at the same time."""

    turns: int = 1
    # Those with a token that is no padding, over all data ranks.
    micro_batches: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Choices that fell on each expert, counted over every rank that takes part."""

    # Of this micro batch, by document where documents are balanced one by one. [documents or 1, E]
    micro_batch: Tensor
    # Of this turn, and of all turns up to it. [E]
    turn: Tensor
    so_far: Tensor


class Balance(nn.Module):
    """The load of one layer's experts since the last update of the weights."""

    load: Tensor
    # Choices beyond the capacity of their expert.
    dropped: Tensor
    # What this rank's tokens added to the balancing losses.
    loss: Tensor
    # The sum over this rank's tokens.
    entropy: Tensor

    def __init__(self, routing: Routing, moe: MoE, balancing: Balancing, groups: Groups) -> None:
        super().__init__()
        self.routing, self.moe, self.groups = routing, moe, groups
        self.balancing = balancing if moe.aux_loss_coefficient else Balancing.NONE
        self.batch = GlobalBatch()
        # By the number of the micro batch: what is computed again must see what it saw the first time.
        self._seen: dict[int, Seen] = {}
        for name, size in (("load", (routing.experts,)), ("dropped", ()), ("loss", ()), ("entropy", ())):
            self.register_buffer(name, torch.zeros(size, dtype=torch.float32), persistent=False)

    def begin(self, batch: GlobalBatch) -> None:
        """A new global batch: nothing has been seen of it."""
        self.batch, self._seen = batch, {}
        for counter in (self.load, self.dropped, self.loss, self.entropy):
            counter.zero_()

    def watched(self, probabilities: Tensor, logits: Tensor, chosen: Tensor, row: Row) -> Tensor:
        """The probabilities, with the balancing losses attached to them."""
        if not torch.is_grad_enabled():
            return probabilities
        counts = self._counts(chosen, row)
        loss = self._loss(logits, counts, row)
        if not computes_again():
            self.load += counts.sum(0)
            self.loss += 0.0 if loss is None else loss.detach()
            self.entropy += routing_entropy(logits, self.routing, row.is_real)
        return probabilities if loss is None else _attached(probabilities, loss)

    def count_dropped(self, chosen: Tensor, row: Row) -> None:
        """Counts the choices that became one of none."""
        if torch.is_grad_enabled() and not computes_again():
            self.dropped += ((chosen == self.routing.experts) & row.is_real.unsqueeze(-1)).sum()

    def _counts(self, chosen: Tensor, row: Row) -> Tensor:
        """Choices of the tokens here. [documents or 1, E]"""
        if self.balancing is Balancing.SEQ_AUX_LOSS:
            documents, segments = len(row.documents.lengths), row.segments
        else:
            documents, segments = 1, torch.zeros_like(row.segments)
        return document_counts(chosen, segments, documents, self.routing.experts, row.is_real)

    def _loss(self, logits: Tensor, counts: Tensor, row: Row) -> Tensor | None:
        if self.balancing not in _WITH_LOSS and not self.moe.z_loss_coefficient:
            return None
        seen = self._everyones(counts, row)
        loss = logits.new_zeros((), dtype=torch.float32)
        if self.balancing in _WITH_LOSS:
            scores = balancing_scores(logits, self.routing) * row.is_real.unsqueeze(-1)
            loss = loss + self.moe.aux_loss_coefficient * self._balancing_loss(scores, seen, row)
        if self.moe.z_loss_coefficient:
            mean = z_loss(logits, self._tokens(seen.micro_batch), row.is_real)
            loss = loss + self.moe.z_loss_coefficient * mean / self.batch.micro_batches
        return loss

    def _balancing_loss(self, scores: Tensor, seen: Seen, row: Row) -> Tensor:
        """What the tokens here add to the mean over micro batches, or over turns."""
        per_token = self.routing.per_token
        if self.balancing is Balancing.GLOBAL_AUX_LOSS:
            # The counts of the whole batch so far, as those of a batch as long as this turn.
            tokens = self._tokens(seen.turn)
            counts = seen.so_far * (tokens / self._tokens(seen.so_far))
            return switch_loss(scores, counts, tokens, per_token) / self.batch.turns
        if self.balancing is Balancing.AUX_LOSS:
            tokens = self._tokens(seen.micro_batch)
            return switch_loss(scores, seen.micro_batch[0], tokens, per_token) / self.batch.micro_batches
        lengths = seen.micro_batch.sum(-1) / per_token
        documents = (lengths > 0).sum().clamp(min=1)
        summed = sequence_loss(scores, seen.micro_batch, lengths, row.segments, per_token)
        return summed / (documents * self.batch.micro_batches)

    def _tokens(self, counts: Tensor) -> Tensor:
        return (counts.sum() / self.routing.per_token).clamp(min=1)

    def _everyones(self, counts: Tensor, row: Row) -> Seen:
        """What the ranks see together; a second time it is remembered, for other micro batches went by in between."""
        if row.number not in self._seen:
            self._seen[row.number] = self._summed(counts)
        return self._seen[row.number]

    def _summed(self, counts: Tensor) -> Seen:
        # Each rank of these groups has its own tokens of the micro batch.
        micro_batch = total(total(counts.clone(), self.groups.context), self.groups.tensor)
        if self.balancing is not Balancing.GLOBAL_AUX_LOSS:
            return Seen(micro_batch, micro_batch[0], micro_batch[0])
        turn = total(micro_batch[0].clone(), self.groups.data)
        before = [seen.turn for seen in self._seen.values()]
        return Seen(micro_batch, turn, torch.stack([turn, *before]).sum(0))


def _attached(x: Tensor, loss: Tensor) -> Tensor:
    result: Tensor = _Attached.apply(x, loss)
    return result


class _Attached(Function):
    """x as it is; in the backward pass the loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)
