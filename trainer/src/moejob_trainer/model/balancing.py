"""Load balancing of experts: losses on the router, a bias on the choice, and the counts that both need.

A balancing loss is attached to the probabilities that continue through the model, so that its gradient meets theirs on
every stage of the pipeline. The loss of the run never contains it.

Every loss is a mean over the tokens or documents of the global batch, never over micro batches, since the layout
decides which documents share a micro batch. With n[d,e] choices of expert e and T[d] tokens in document d, s scores, k
choices of a token, E experts, D documents and T tokens in all:

    L[d] = E sum_e n[d,e] / (k T[d]) * sum_(t in d) s[t,e] / T[d]
    AuxLoss = sum_d T[d] / T * L[d]      SeqAuxLoss = sum_d L[d] / D      GlobalAuxLoss = L[all as one document]

ExpertBias moves the bias by the same counts, with SeqAuxLoss beside it where the job asks for it, as DeepSeek-V3 does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from moejob_api.job.moe import BalancingMethod, MoE
from moejob_trainer.distributed.collectives import sum_over_group
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.layers.routing import (
    Routing,
    balancing_scores,
    document_counts,
    routing_entropy,
    sequence_loss,
    switch_loss,
    z_loss,
)
from moejob_trainer.model.packed_batch import PackedBatch
from moejob_trainer.model.recompute import is_recomputing

_WITH_LOSS = (BalancingMethod.AUX_LOSS, BalancingMethod.SEQ_AUX_LOSS, BalancingMethod.GLOBAL_AUX_LOSS)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """Tokens and documents of an update over all ranks, as one layer counts them: MTP modules see fewer."""

    tokens: int = 1
    documents: int = 1


class ExpertBalance(nn.Module):
    """The load of one layer's experts since the last update of the weights."""

    load: Tensor
    # Choices beyond the capacity of their expert.
    dropped: Tensor
    # What this rank's tokens added to the balancing losses.
    loss: Tensor
    # The sum over this rank's tokens.
    entropy: Tensor
    # Choices that were replayed, and those among them that the router would not have made.
    replayed: Tensor
    differing: Tensor

    def __init__(self, routing: Routing, moe: MoE, balancing: BalancingMethod, groups: Groups) -> None:
        super().__init__()
        self.routing, self.moe, self.groups = routing, moe, groups
        self.balancing, self.coefficient = _choose_loss(balancing, moe)
        self.batch = GlobalBatch()
        # Choices of the whole global batch, where they are counted before it is trained on. [E]
        self.counted: Tensor | None = None
        # By the number of the micro batch: a layer that is computed again needs no second sum over ranks.
        self._summed_counts: dict[int, Tensor] = {}
        sizes = {"load": (routing.experts,), "dropped": (), "loss": (), "entropy": (), "replayed": (), "differing": ()}
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(size, dtype=torch.float32), persistent=False)

    @property
    def needs_counts_first(self) -> bool:
        """The loss needs the choices of the whole global batch before the first backward pass."""
        return self.balancing is BalancingMethod.GLOBAL_AUX_LOSS

    def start_batch(self, batch: GlobalBatch) -> None:
        """A new global batch: nothing has been seen of it."""
        self.batch, self.counted, self._summed_counts = batch, None, {}
        self._reset_counters()

    def finish_counting(self) -> None:
        """Keep the choices that were counted on all ranks; training counts from zero."""
        self.counted = sum_over_group(sum_over_group(self.load.clone(), self.groups.tensor), self.groups.replicas)
        self._reset_counters()

    def _reset_counters(self) -> None:
        for counter in (self.load, self.dropped, self.loss, self.entropy, self.replayed, self.differing):
            counter.zero_()

    def attach_losses(self, probabilities: Tensor, logits: Tensor, chosen: Tensor, packed: PackedBatch) -> Tensor:
        """The probabilities, with the balancing losses attached to them."""
        if packed.counts_choices:
            self.load += self._count_choices(chosen, packed).sum(0)
        if not torch.is_grad_enabled():
            return probabilities
        counts = self._count_choices(chosen, packed)
        loss = self._compute_loss(logits, counts, packed)
        if not is_recomputing():
            self.load += counts[0] if len(counts) == 1 else counts.sum(0)
            if loss is not None:
                self.loss += loss.detach()
            self.entropy += routing_entropy(logits, self.routing, packed.is_real)
        return probabilities if loss is None else _attach_loss(probabilities, loss)

    def count_dropped(self, chosen: Tensor, packed: PackedBatch) -> None:
        """Count the choices that became one of none."""
        if torch.is_grad_enabled() and not is_recomputing():
            self.dropped += ((chosen == self.routing.experts) & packed.is_real.unsqueeze(-1)).sum()

    def count_replayed(self, router_choices: Tensor, chosen: Tensor, is_known: Tensor) -> None:
        """Count the choices that were replayed, and how many of them the router has not made itself. [t, k] each"""
        if torch.is_grad_enabled() and not is_recomputing():
            is_router_choice = (chosen.unsqueeze(-1) == router_choices.unsqueeze(-2)).any(-1)
            self.replayed += is_known.sum()
            self.differing += (is_known & ~is_router_choice).sum()

    def _count_choices(self, chosen: Tensor, packed: PackedBatch) -> Tensor:
        """Choices of the tokens here, by document where these are balanced one by one. [documents or 1, E]"""
        by_document = self.balancing in (BalancingMethod.AUX_LOSS, BalancingMethod.SEQ_AUX_LOSS)
        documents, segments = (len(packed.documents.lengths), packed.segments) if by_document else (1, None)
        return document_counts(chosen, segments, documents, self.routing.experts, packed.is_real)

    def _compute_loss(self, logits: Tensor, counts: Tensor, packed: PackedBatch) -> Tensor | None:
        if self.balancing not in _WITH_LOSS and not self.moe.z_loss_coefficient:
            return None
        loss = logits.new_zeros((), dtype=torch.float32)
        if self.balancing in _WITH_LOSS:
            scores = balancing_scores(logits, self.routing) * packed.is_real.unsqueeze(-1)
            loss = loss + self.coefficient * self._balancing_loss(scores, counts, packed)
        if self.moe.z_loss_coefficient:
            loss = loss + self.moe.z_loss_coefficient * z_loss(logits, self.batch.tokens, packed.is_real)
        return loss

    def _balancing_loss(self, scores: Tensor, counts: Tensor, packed: PackedBatch) -> Tensor:
        """Return the part of the tokens here in the mean over the global batch."""
        per_token = self.routing.per_token
        if self.balancing is BalancingMethod.GLOBAL_AUX_LOSS:
            if self.counted is None:
                raise RuntimeError("the choices of the global batch were not counted before it was trained on")
            return switch_loss(scores, self.counted, self.batch.tokens, per_token)
        counts = self._sum_document_counts(counts, packed)
        lengths = counts.sum(-1) / per_token
        if self.balancing is BalancingMethod.SEQ_AUX_LOSS:
            return sequence_loss(scores, counts, lengths, packed.segments, per_token) / self.batch.documents
        weighted = counts * lengths.unsqueeze(-1)
        return sequence_loss(scores, weighted, lengths, packed.segments, per_token) / self.batch.tokens

    def _sum_document_counts(self, counts: Tensor, packed: PackedBatch) -> Tensor:
        """Sum the counts over the ranks that hold other tokens of the same documents. [documents, E]"""
        if packed.number not in self._summed_counts:
            self._summed_counts[packed.number] = sum_over_group(
                sum_over_group(counts.clone(), self.groups.context), self.groups.tensor
            )
        return self._summed_counts[packed.number]


def _choose_loss(balancing: BalancingMethod, moe: MoE) -> tuple[BalancingMethod, float]:
    """Return the balancing loss and its coefficient. ExpertBias may have a loss too, the loss of each sequence."""
    if balancing is BalancingMethod.EXPERT_BIAS:
        balancing, coefficient = BalancingMethod.SEQ_AUX_LOSS, moe.seq_aux_loss_coefficient
    else:
        coefficient = moe.aux_loss_coefficient
    return (balancing, coefficient) if coefficient else (BalancingMethod.NONE, 0.0)


def _attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    result: Tensor = _AttachLoss.apply(x, loss)
    return result


class _AttachLoss(Function):
    """x as it is; in the backward pass the loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)
