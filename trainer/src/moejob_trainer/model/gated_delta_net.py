"""Linear attention by the gated delta rule (Gated DeltaNet): a state of fixed size instead of keys and values.

One matrix projects a token to query, key and values, those of one key head side by side: a cut between tensor ranks is
a cut between key heads. Files of Qwen3-Next have the gates beside them, and strengths and decays in a second matrix;
those of Qwen3.5 have a matrix for each. All have one convolution for the channels of all queries, then
of all keys, then of all values: every rank holds it whole, and uses its own channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moejob_api.models.shape import LinearAttention
from moejob_trainer.layers.delta_rule import DeltaInputs, apply_delta_rule, convolve_documents
from moejob_trainer.layers.norm import RMSNorm
from moejob_trainer.layers.precision import at_least_float32
from moejob_trainer.model.linear import Linear, OutputLinear, TensorShare, mark_partial
from moejob_trainer.model.packed_batch import PackedBatch
from moejob_trainer.model.recompute import maybe_recompute


class GatedDeltaNet(nn.Module):
    """Short convolution, gated delta rule, and a norm whose output is gated; heads divided over the tensor group."""

    def __init__(self, shape: LinearAttention, hidden: int, share: TensorShare, epsilon: float) -> None:
        super().__init__()
        self.shape, self.share = shape, share
        self.key_heads = share.local_size(shape.key_heads, "key heads of linear attention")
        self.value_heads = share.local_size(shape.value_heads, "value heads of linear attention")
        # Value heads of a key head.
        self.per_key = shape.value_heads // shape.key_heads
        values = self.per_key * shape.value_dim
        if shape.separate_gates:
            self.state_input = Linear((self.key_heads, 2 * shape.key_dim + values), (hidden,))
            self.state_gate = Linear((self.value_heads, shape.value_dim), (hidden,))
            self.state_strength = Linear((self.value_heads,), (hidden,))
            self.state_decay = Linear((self.value_heads,), (hidden,))
        else:
            self.state_input = Linear((self.key_heads, 2 * shape.key_dim + 2 * values), (hidden,))
            self.state_rates = Linear((self.key_heads, 2 * self.per_key), (hidden,))
        channels = 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
        self.convolution = nn.Parameter(torch.empty(channels, 1, shape.convolution_width))
        self.decay_log = nn.Parameter(torch.empty(self.value_heads))
        self.decay_bias = nn.Parameter(torch.empty(self.value_heads))
        self.state_norm = RMSNorm(shape.value_dim, epsilon)
        self.state_output = OutputLinear(hidden, (self.value_heads, shape.value_dim), share)
        for parameter in (self.convolution, self.state_norm.weight):
            mark_partial(parameter)

    def forward(self, x: Tensor, packed: PackedBatch) -> Tensor:
        """Mix the tokens of each document by the heads of this rank. [t, h] -> [t, h]"""
        if self.shape.separate_gates:
            matrices = [self.state_input, self.state_gate, self.state_strength, self.state_decay]
        else:
            matrices = [self.state_input, self.state_rates]
        projected = self.share.multiply_columns(x, *matrices)
        # In operations of torch, the rule makes a dozen times its inputs: it is always computed again.
        return self.state_output(maybe_recompute(True, self._mix_tokens, packed, *projected))

    def _mix_tokens(self, packed: PackedBatch, *projected: Tensor) -> Tensor:
        mixed, gate, strength, decay = self._split_products(*projected)
        output = apply_delta_rule(
            self._make_inputs(self._convolve_heads(mixed, packed), strength, decay), packed.documents
        )
        gate = at_least_float32(gate.reshape(output.shape))
        return (at_least_float32(self.state_norm(output)) * functional.silu(gate)).to(output.dtype)

    def _split_products(self, inputs: Tensor, *others: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Return queries, keys and values, then gates, strengths and decays."""
        keys, values = self.shape.key_dim, self.per_key * self.shape.value_dim
        if self.shape.separate_gates:
            gate, strength, decay = others
            return [*inputs.split([keys, keys, values], -1)], gate, strength, decay
        (rates,) = others
        *mixed, gate = inputs.split([keys, keys, values, values], -1)
        strength, decay = (rate.flatten(1) for rate in rates.chunk(2, -1))
        return mixed, gate, strength, decay

    def _convolve_heads(self, mixed: list[Tensor], packed: PackedBatch) -> list[Tensor]:
        """Convolve this rank's queries, keys and values. Each [t, key heads, d]"""
        flat = [part.flatten(1) for part in mixed]
        convolved = convolve_documents(torch.cat(flat, -1), self._own_channels(), packed.documents)
        return [*convolved.split([part.shape[1] for part in flat], -1)]

    def _own_channels(self) -> Tensor:
        # FSDP has flattened it.
        weight, rank, size = self.convolution.flatten(0, -2), self.share.group.rank, self.share.group.size
        all_keys, all_values = self.shape.key_heads * self.shape.key_dim, self.shape.value_heads * self.shape.value_dim
        if size == 1:
            return weight
        parts = weight.split([all_keys, all_keys, all_values])
        return torch.cat([part.chunk(size)[rank] for part in parts])

    def _make_inputs(self, convolved: list[Tensor], strength: Tensor, decay: Tensor) -> DeltaInputs:
        query, key, value = convolved
        decay = functional.softplus(at_least_float32(decay) + at_least_float32(self.decay_bias))
        return DeltaInputs(
            query.unflatten(1, (self.key_heads, -1)),
            key.unflatten(1, (self.key_heads, -1)),
            value.unflatten(1, (self.value_heads, -1)),
            -at_least_float32(self.decay_log).exp() * decay,
            strength.sigmoid(),
        )
