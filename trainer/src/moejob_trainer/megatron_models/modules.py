"""The modules of ours in Megatron's layers: attention over packed documents, experts, norms and rotary angles.

Each has the signature under which Megatron's specs build it. Megatron's local attention knows neither packed documents
nor context ranks, its experts multiply one after the other, and its norm refuses sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from moejob_trainer.errors import BadConfiguration
from moejob_trainer.layers.activation import swiglu
from moejob_trainer.layers.attention import compute_attention
from moejob_trainer.layers.documents import Documents
from moejob_trainer.layers.experts import grouped_linear
from moejob_trainer.layers.gradient_sums import find_gradient_sum
from moejob_trainer.layers.norm import RMSNorm
from moejob_trainer.layers.rotary import Rotary
from moejob_trainer.model.linear import mark_expert


@dataclass
class PackedDocuments(PackedSeqParams):  # type: ignore[misc]
    """One packed row, as Megatron hands it down to attention: its recomputation gets the same again.

    `qkv_format` stays None. Under "thd" Megatron would turn keys by the place in its own division of documents.
    """

    documents: Documents | None = None
    context_group: dist.ProcessGroup | None = None


class DocumentAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside the documents of a packed row, over all context ranks."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedDocuments, **__: Any
    ) -> Tensor:
        """[t, 1, n, d], [t, 1, g, d] twice -> [t, 1, n d]"""
        if packed_seq_params.documents is None:
            raise ValueError("a packed row has documents")
        attended = compute_attention(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            packed_seq_params.documents,
            scale=self.scale,
            context_group=packed_seq_params.context_group,
        )
        return attended.flatten(1).unsqueeze(1)


class DocumentRotary(nn.Module):
    """Megatron's rotary angles at the places of a row's tokens in their documents."""

    def __init__(self, rotary: Any, expected: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        frequencies = rotary.inv_freq.cpu()
        if expected.attention_factor != 1.0 or not torch.allclose(frequencies, expected.pair_frequencies(), rtol=1e-5):
            raise BadConfiguration(
                f"Megatron would turn queries and keys otherwise than {expected} says; set model.implementation to "
                "Native"
            )

    def get_rotary_seq_len(self, *arguments: Any) -> PackedDocuments:
        """Return what `forward` needs in the place of a length; Megatron passes on what it gets."""
        packed: PackedDocuments = arguments[-1]
        return packed

    def forward(self, packed: PackedDocuments, **_: Any) -> Tensor:
        """Return the angles of this rank's tokens. [t, 1, 1, d]"""
        if packed.documents is None:
            raise ValueError("a packed row has documents")
        angles: Tensor = self.rotary.get_emb(max(packed.documents.lengths))
        return angles[packed.documents.position_ids()]


class GroupedExperts(nn.Module):
    """The experts of this rank in one grouped product each way."""

    def __init__(self, count: int, config: Any, *, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        width, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(count, 2, width, hidden, dtype=config.params_dtype))
        self.down = nn.Parameter(torch.empty(count, hidden, width, dtype=config.params_dtype))
        for parameter in self.parameters():
            mark_expert(parameter)

    def forward(self, rows: Tensor, counts: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """Rows [r, h] sorted by expert, with the rows of each expert [e] -> weighted rows [r, h]"""
        bounds = torch.zeros(len(counts) + 1, dtype=torch.int32, device=rows.device)
        bounds[1:] = counts.cumsum(0)
        gate_up = grouped_linear(rows, self.gate_up.flatten(1, 2), bounds, total=find_gradient_sum(self.gate_up))
        activated = swiglu(gate_up.unflatten(1, (2, -1)), probabilities)
        return grouped_linear(activated, self.down, bounds, total=find_gradient_sum(self.down)), None


def make_norm(config: Any, hidden_size: int, eps: float, **_: Any) -> RMSNorm:
    """Return a norm as Megatron's layers ask for it."""
    norm = RMSNorm(hidden_size, eps).to(config.params_dtype)
    # A rank normalises its share of the sequence only, so `mark_parameters` has its gradient summed.
    norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class LayerModules(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's own matrices, with our norms, attention and experts."""

    def layer_norm(self, *_: Any, **__: Any) -> Any:
        """Return the maker of norms."""
        return make_norm

    def core_attention(self) -> type:
        """Return the attention between projections."""
        return DocumentAttention

    def grouped_mlp_modules(self, *_: Any) -> Any:
        """Return the experts."""
        return GroupedExperts
