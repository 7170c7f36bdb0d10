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
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from moejob_trainer.distributed.groups import Group
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.layers.activation import clamped_swiglu, swiglu
from moejob_trainer.layers.attention import compute_attention
from moejob_trainer.layers.documents import Documents
from moejob_trainer.layers.experts import add_biases, grouped_linear, repeat_biases
from moejob_trainer.layers.gradient_sums import find_gradient_sum
from moejob_trainer.layers.norm import RMSNorm
from moejob_trainer.layers.rotary import Rotary, YarnScaling
from moejob_trainer.layers.routing import Routing, route_tokens
from moejob_trainer.model.joint_norm import JointNorm
from moejob_trainer.model.linear import mark_expert


@dataclass
class PackedDocuments(PackedSeqParams):  # type: ignore[misc]
    """One packed row, as Megatron hands it down to attention: its recomputation gets the same again.

    `qkv_format` stays None. Under "thd" Megatron would turn keys by the place in its own division of documents.
    """

    documents: Documents | None = None
    context_group: dist.ProcessGroup | None = None


class DocumentAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside the documents of a packed row, over all context ranks.

    sinks: this rank's heads, where each has a learned logit for no token; none without them.
    """

    def __init__(
        self,
        config: Any,
        *_: Any,
        softmax_scale: float | None = None,
        window: int | None = None,
        sinks: int = 0,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.window = window
        self.sinks = nn.Parameter(torch.empty(sinks, dtype=config.params_dtype)) if sinks else None

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
            window=self.window,
            sinks=self.sinks,
            context_group=packed_seq_params.context_group,
        )
        return attended.flatten(1).unsqueeze(1)


class DocumentRotary(nn.Module):
    """Megatron's rotary angles at the places of a row's tokens in their documents."""

    def __init__(self, rotary: Any, expected: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        if isinstance(expected.scaling, YarnScaling):
            # Megatron's own class for YaRN gives no angles alone; its attention scales them, as the settings say.
            rotary.inv_freq = expected.pair_frequencies(rotary.inv_freq.device)
        elif not torch.allclose(rotary.inv_freq.cpu(), expected.pair_frequencies(), rtol=1e-5):
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
    """The experts of this rank in one grouped product each way. Those with biases have gpt-oss's activation."""

    def __init__(self, count: int, config: Any, *, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.gate_limit: float | None = config.activation_func_clamp_value
        width, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(count, 2, width, hidden, dtype=config.params_dtype))
        self.down = nn.Parameter(torch.empty(count, hidden, width, dtype=config.params_dtype))
        self.gate_up_bias = self.down_bias = None
        if config.add_bias_linear:
            self.gate_up_bias = nn.Parameter(torch.empty(count, 2, width, dtype=config.params_dtype))
            self.down_bias = nn.Parameter(torch.empty(count, hidden, dtype=config.params_dtype))
        for parameter in self.parameters():
            mark_expert(parameter)

    def forward(self, rows: Tensor, counts: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """Rows [r, h] sorted by expert, with the rows of each expert [e] -> weighted rows [r, h]"""
        bounds = torch.zeros(len(counts) + 1, dtype=torch.int32, device=rows.device)
        bounds[1:] = counts.cumsum(0)
        gate_up = grouped_linear(rows, self.gate_up.flatten(1, 2), bounds, total=find_gradient_sum(self.gate_up))
        if self.gate_up_bias is not None:
            gate_up = add_biases(gate_up, self.gate_up_bias.flatten(1), bounds)
        output = grouped_linear(
            self._apply_activation(gate_up.unflatten(1, (2, -1)), probabilities),
            self.down,
            bounds,
            total=find_gradient_sum(self.down),
        )
        if self.down_bias is not None:
            biases = repeat_biases(self.down_bias, bounds, len(rows)) * probabilities.unsqueeze(-1)
            output = output + biases.to(output.dtype)
        return output, None

    def _apply_activation(self, gate_up: Tensor, probabilities: Tensor) -> Tensor:
        if self.gate_limit is None:
            return swiglu(gate_up, probabilities)
        return clamped_swiglu(gate_up, probabilities, limit=self.gate_limit)


def make_norm(config: Any, hidden_size: int, eps: float, **_: Any) -> RMSNorm:
    """Return a norm as Megatron's layers ask for it."""
    norm = RMSNorm(hidden_size, eps).to(config.params_dtype)
    # A rank normalises its share of the sequence only, so `mark_parameters` has its gradient summed.
    norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class BiasedSoftmaxRouter(TopKRouter):  # type: ignore[misc]
    """Chooses experts by softmax scores and a bias, as ERNIE-4.5 does; Megatron's router adds one to sigmoids only."""

    def __init__(self, config: Any, **modules: Any) -> None:
        super().__init__(config=config, **modules)
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts, dtype=torch.float32))

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Logits [t, 1, E] -> weights [t, E], zero where a token does not go, and where it goes [t, E]"""
        rows = logits.flatten(0, 1)
        routing = Routing(self.config.num_moe_experts, self.topk, renormalized=True)
        chosen, weights = route_tokens(rows, routing, selection_bias=self.expert_bias)
        goes = torch.zeros_like(rows, dtype=torch.bool).scatter(1, chosen, value=True)
        return weights.new_zeros(rows.shape).scatter(1, chosen, weights), goes


class HeadsNorm(JointNorm):
    """One norm over all heads of a token, of which this rank has some."""

    def forward(self, x: Tensor) -> Tensor:
        """[t, 1, n, d] -> [t, 1, n, d]"""
        return super().forward(x.squeeze(1)).unsqueeze(1)


def make_heads_norm(config: Any, hidden_size: int, eps: float, *, heads: int, group: Group) -> HeadsNorm:
    """Return a norm over `heads` heads of `hidden_size` numbers, which the group divides."""
    norm = HeadsNorm((heads // group.size, hidden_size), heads * hidden_size, group, eps)
    return norm.to(config.params_dtype)


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
