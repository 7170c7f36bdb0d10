"""What keeps experts evenly loaded: losses on the router, a bias on the choice, and the counts both live on.

A balancing loss is attached to the probabilities that go on through the model, so that its gradient meets theirs
whatever stage of the pipeline this is; it never appears in the loss of the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from moejob_api.job.moe import Balancing, MoE
from moejob_trainer.groups import Groups, total
from moejob_trainer.layers.routing import Routing, balancing_scores, expert_counts, switch_loss, z_loss
from moejob_trainer.model.recompute import computes_again
from moejob_trainer.model.row import Row

_WITH_LOSS = (Balancing.AUX_LOSS, Balancing.SEQ_AUX_LOSS, Balancing.GLOBAL_AUX_LOSS)


class Balance(nn.Module):
    """The load of one layer's experts since the last update of the weights."""

    load: Tensor

    def __init__(self, routing: Routing, moe: MoE, groups: Groups) -> None:
        super().__init__()
        self.routing, self.moe, self.groups = routing, moe, groups
        # Of one micro batch in the loss of the global batch: the engine knows how many there are.
        self.loss_scale = 1.0
        self.register_buffer("load", torch.zeros(routing.experts, dtype=torch.float32), persistent=False)

    def watched(self, probabilities: Tensor, logits: Tensor, chosen: Tensor, row: Row) -> Tensor:
        """The probabilities, with the balancing loss attached to them."""
        if not torch.is_grad_enabled():
            return probabilities
        counts = expert_counts(chosen, self.routing.experts, row.is_real)
        if not computes_again():
            self.load += counts
        loss = self._loss(logits, counts, row)
        return probabilities if loss is None else _attached(probabilities, loss * self.loss_scale)

    def _loss(self, logits: Tensor, counts: Tensor, row: Row) -> Tensor | None:
        losses = []
        if self.moe.balancing in _WITH_LOSS and self.moe.aux_loss_coefficient:
            losses.append(self.moe.aux_loss_coefficient * self._balancing_loss(logits, counts, row))
        if self.moe.z_loss_coefficient:
            tokens = self._over_micro_batch(row.is_real.sum().float()).clamp(min=1)
            losses.append(self.moe.z_loss_coefficient * z_loss(logits, tokens, row.is_real))
        return sum(losses[1:], losses[0]) if losses else None

    def _balancing_loss(self, logits: Tensor, counts: Tensor, row: Row) -> Tensor:
        """Evens out the load of a whole micro batch, whichever ranks hold its tokens."""
        scores = balancing_scores(logits, self.routing) * row.is_real.unsqueeze(-1)
        everyones = self._over_micro_batch(counts.clone())
        tokens = (everyones.sum() / self.routing.per_token).clamp(min=1)
        return switch_loss(scores, everyones, tokens, self.routing.per_token)

    def _over_micro_batch(self, value: Tensor) -> Tensor:
        """The sum over the ranks that share a micro batch: each has its own of its tokens."""
        return total(total(value, self.groups.context), self.groups.tensor)


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
