"""Memory of one vLLM engine: weights, workspace, and the KV cache that remains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from moejob_api.arithmetic import ceil_div, round_up
from moejob_api.derived import rollout_layout
from moejob_api.hardware import memory_limit_bytes
from moejob_api.job import Spec
from moejob_api.job.grpo import Grpo
from moejob_api.layout.sizes import Layout
from moejob_api.models.parameters import ParameterCounts, final_norm_weights, layer_kinds, layer_weights
from moejob_api.models.shape import Attention, GroupedAttention, LatentAttention, LinearAttention, ModelShape
from moejob_api.planner.memory.constants import ENGINE_VOCABULARY_MULTIPLE, ENGINE_WORKSPACE_BYTES, USEFUL_SEQUENCES
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on each GPU of one engine. cache_bytes is None when the memory of a GPU is not known.

    sequence_bytes: KV cache of one sequence of data.maxLength. useful_sequences: as many as are worth running at once.
    """

    gpus: int
    weights: int
    workspace: int
    sequence_bytes: int
    useful_sequences: int
    reserved: int | None

    @property
    def cache_bytes(self) -> int | None:
        """KV cache that remains of what the engine may take."""
        return None if self.reserved is None else self.reserved - self.weights - self.workspace

    @property
    def least_bytes(self) -> int:
        """Return the bytes of an engine with room for one sequence, the least it runs with."""
        return self.weights + self.workspace + self.sequence_bytes

    @property
    def bytes(self) -> int:
        """Return the bytes of the engine: all it may take, or enough for useful work when that is not known."""
        useful = self.weights + self.workspace + self.useful_sequences * self.sequence_bytes
        return useful if self.reserved is None else max(self.reserved, self.least_bytes)

    @property
    def sequences(self) -> int | None:
        """Sequences of data.maxLength that fit at once."""
        return None if self.cache_bytes is None else max(0, self.cache_bytes) // self.sequence_bytes

    @property
    def can_run(self) -> bool:
        """Return whether at least one sequence fits."""
        return self.sequences is None or self.sequences > 0


def estimate_engine(spec: Spec, shape: ModelShape, layout: Layout) -> EngineMemory | None:
    """The engine of a GRPO job."""
    sizes = rollout_layout(spec, layout)
    return None if spec.grpo is None or sizes is None else estimate_engine_among(spec, spec.grpo, shape, sizes.engines)


def estimate_engine_among(spec: Spec, grpo: Grpo, shape: ModelShape, engines: int) -> EngineMemory:
    """One of several engines that share the answers of a step."""
    limit, tensor = memory_limit_bytes(spec.resources), grpo.rollout.tensor
    return EngineMemory(
        gpus=tensor,
        weights=engine_weights(shape, tensor) * spec.model.dtype.size_bytes,
        workspace=ENGINE_WORKSPACE_BYTES,
        sequence_bytes=max(1, sequence_bytes(spec, grpo, shape)),
        useful_sequences=min(USEFUL_SEQUENCES, ceil_div(grpo.answers_per_step, engines)),
        reserved=None if limit is None else int(limit * grpo.rollout.engine_share),
    )


def engine_weights(shape: ModelShape, tensor: int) -> int:
    """Parameters on one GPU of an engine; experts are divided like other matrices."""
    rows = round_up(shape.vocabulary, ENGINE_VOCABULARY_MULTIPLE * tensor) // tensor
    total = rows * shape.hidden * (1 if shape.tied_embeddings else 2)
    for layer, count in layer_kinds(shape):
        heads = layer.attention.key_value_heads if isinstance(layer.attention, GroupedAttention) else tensor
        total += count * _divided_parameters(layer_weights(shape, layer), tensor, heads)
    return total + _divided_parameters(final_norm_weights(shape), tensor, tensor)


def _divided_parameters(weights: ParameterCounts, tensor: int, heads: int) -> int:
    split = ceil_div(weights.tensor + weights.routed, tensor)
    return split + ceil_div(weights.key_value, min(tensor, heads)) + weights.replicated


def sequence_bytes(spec: Spec, grpo: Grpo, shape: ModelShape) -> int:
    """KV cache of one sequence of data.maxLength on one GPU of an engine."""
    length, tensor = spec.data.max_length, grpo.rollout.tensor
    element = spec.model.dtype.size_bytes
    return sum(count * _cached_bytes(layer.attention, tensor, length, element) for layer, count in layer_kinds(shape))


def _cached_bytes(attention: Attention, tensor: int, length: int, element: int) -> int:
    """Bytes that one layer remembers of a sequence."""
    match attention:
        case GroupedAttention():
            tokens = length if attention.window is None else min(length, attention.window)
            return tokens * 2 * max(1, ceil_div(attention.key_value_heads, tensor)) * attention.head_dim * element
        case LatentAttention():
            # One compressed vector serves all heads, so every GPU of the engine holds it whole.
            return length * (attention.key_value_rank + attention.rope_dim) * element
        case LinearAttention():
            heads = ceil_div(attention.value_heads, tensor)
            channels = 2 * attention.key_heads * attention.key_dim + attention.value_heads * attention.value_dim
            state = heads * attention.key_dim * attention.value_dim * FLOAT32_BYTES
            return state + attention.convolution_width * ceil_div(channels, tensor) * element
        case _:
            assert_never(attention)
