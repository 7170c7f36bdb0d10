"""Multi-token prediction (MTP): a module predicts the token behind the next one, as in DeepSeek-V3.

Knows neither embedding nor output layer, which are the model's own, nor the loss on its outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moejob_api.job.job import Spec
from moejob_api.job.training import RecomputeGranularity
from moejob_api.models.shape import Layer as LayerShape
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.layer import TransformerLayer, make_norm
from moejob_trainer.model.linear import Linear, TensorShare, mark_partial
from moejob_trainer.model.packed_batch import PackedBatch
from moejob_trainer.model.recompute import maybe_recompute


class MTPModule(nn.Module):
    """One layer behind the model's last, which sees one token more than the layers before it."""

    def __init__(self, shape: LayerShape, model: Architecture, spec: Spec, groups: Groups) -> None:
        super().__init__()
        hidden, share = model.shape.hidden, TensorShare(groups.tensor, spec.parallelism.sequence_parallel)
        self.embedding_norm, self.hidden_norm = make_norm(hidden, model, share), make_norm(hidden, model, share)
        # Whole on every tensor rank: each projects its own rows.
        self.projection = Linear((hidden,), (2 * hidden,))
        mark_partial(self.projection.weight, is_partial=share.sequence_parallel)
        self.layer = TransformerLayer(shape, model, spec, groups)
        self.final_norm = make_norm(hidden, model, share)
        self.is_recomputed = spec.training.recompute.granularity is RecomputeGranularity.FULL

    def forward(self, hidden: Tensor, embedded: Tensor, packed: PackedBatch) -> Tensor:
        """Combine the input of the output layer, or of the module before, with the next token: [t, h] -> [t, h]"""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
        mtp: Tensor = self.final_norm(maybe_recompute(self.is_recomputed, self.layer, self.projection(both), packed))
        return mtp
