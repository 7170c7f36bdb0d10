"""The part of the model that one pipeline stage (or one of its chunks) holds: from tokens or hidden states to hidden
states or log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from moejob_api.job.job import Spec
from moejob_api.job.moe import Dispatcher
from moejob_api.job.training import RecomputeModule
from moejob_api.memory.constants import LOSS_CHUNK_TOKENS
from moejob_api.memory.share import balancing
from moejob_api.models.shape import DenseMLP, Experts, GroupedAttention, ModelShape
from moejob_api.models.shape import LatentAttention as LatentShape
from moejob_api.models.shape import Layer as LayerShape
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.groups import Groups
from moejob_trainer.layers.norm import RMSNorm
from moejob_trainer.layers.vocabulary import token_log_probabilities
from moejob_trainer.model.adapters import drawn_for
from moejob_trainer.model.adapting import adapt
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.attention import Attention, AttentionSettings
from moejob_trainer.model.feedforward import GatedMLP
from moejob_trainer.model.latent import LatentAttention
from moejob_trainer.model.linear import TensorShare, mark_partial, mark_tied
from moejob_trainer.model.mixture import Mixture, MixtureSettings
from moejob_trainer.model.parameters import padded_vocabulary, parameters
from moejob_trainer.model.recompute import recomputed, recomputed_groups, recomputed_modules
from moejob_trainer.model.row import Row


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Which layers a stage holds, and whether it stands at an end of the model."""

    layers: range
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class RowInput:
    """This rank's part of one packed row."""

    tokens: Tensor
    labels: Tensor
    row: Row


class Layer(nn.Module):
    """Attention, then a feed-forward network or experts, each behind a norm and beside a residual."""

    def __init__(self, index: int, model: Architecture, spec: Spec, groups: Groups) -> None:
        super().__init__()
        shape, hidden = model.shape.layers[index], model.shape.hidden
        share = TensorShare(groups.tensor, spec.parallelism.sequence_parallel)
        self.recompute = recomputed_modules(spec.training.recompute)
        self.attention_norm = _norm(hidden, model, share)
        self.attention = _attention(shape, model, share, self.recompute)
        self.mlp_norm = _norm(hidden, model, share)
        match shape.mlp:
            case DenseMLP(intermediate, bias):
                again = RecomputeModule.MLP in self.recompute
                self.mlp = GatedMLP(hidden, intermediate, share, bias=bias, is_recomputed=again)
            case Experts() as experts:
                settings = mixture_settings(model, spec)
                self.moe = Mixture(experts, hidden, groups, share, settings)

    def forward(self, x: Tensor, row: Row) -> Tensor:
        """[t, h] -> [t, h]"""
        again = RecomputeModule.NORMS in self.recompute
        x = x + self.attention(recomputed(again, self.attention_norm, x), row)
        y = recomputed(again, self.mlp_norm, x)
        return x + (self.moe(y, row) if hasattr(self, "moe") else self.mlp(y))


class Embedding(nn.Module):
    """The rows of the vocabulary that this tensor rank holds."""

    def __init__(self, shape: ModelShape, share: TensorShare) -> None:
        super().__init__()
        self.share = share
        rows = share.divided(padded_vocabulary(shape), "padded vocabulary")
        self.first = rows * share.group.rank
        self.weight = nn.Parameter(torch.empty(rows, shape.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows] -> [t, h]"""
        own = tokens - self.first
        is_here = (own >= 0) & (own < len(self.weight))
        found = functional.embedding(own * is_here, self.weight)
        return self.share.left(found * is_here.unsqueeze(-1))


class Head(nn.Module):
    """What the model says about the label of every token."""

    def __init__(self, shape: ModelShape, share: TensorShare, temperature: float) -> None:
        super().__init__()
        self.vocabulary, self.share, self.temperature = shape.vocabulary, share, temperature
        rows = share.divided(padded_vocabulary(shape), "padded vocabulary")
        self.weight = nn.Parameter(torch.empty(rows, shape.hidden))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[t, h], [rows] -> log-probability and entropy of every token, float32 [rows]"""
        return token_log_probabilities(
            self.share.entered(x),
            self.weight,
            labels,
            vocabulary=self.vocabulary,
            group=self.share.group.handle,
            chunk_tokens=LOSS_CHUNK_TOKENS,
            temperature=self.temperature,
            sums_hidden_gradient=False,
        )


class Stage(nn.Module):
    """One pipeline stage, or one of its chunks."""

    def __init__(self, model: Architecture, spec: Spec, groups: Groups, place: StagePlace) -> None:
        super().__init__()
        self.model, self.place, self.groups = model, place, groups
        self.share = TensorShare(groups.tensor, spec.parallelism.sequence_parallel)
        shape = model.shape
        temperature = 1.0 if spec.grpo is None else spec.grpo.temperature
        if place.is_first:
            self.embedding = Embedding(shape, self.share)
        self.layers = nn.ModuleDict({str(index): Layer(index, model, spec, groups) for index in place.layers})
        if place.is_last:
            self.final_norm = _norm(shape.hidden, model, self.share)
            self.output = Head(shape, self.share, temperature)
        if shape.tied_embeddings:
            self._tie()
        self.recompute = recomputed_groups(spec.training.recompute, len(place.layers))
        self.offloads = spec.memory.offload_activations
        self._received: Tensor | None = None
        if spec.training.lora is not None:
            declared = {parameter.name: parameter for parameter in parameters(shape)}
            adapt(self, declared, spec.training.lora, spec.training.seed)

    def _tie(self) -> None:
        if self.place.is_first:
            mark_tied(self.embedding.weight, is_copy=False)
        if self.place.is_first and self.place.is_last:
            self.output.weight = self.embedding.weight
        elif self.place.is_last:
            mark_tied(self.output.weight, is_copy=True)

    def set_input_tensor(self, received: Sequence[Tensor | None]) -> None:
        """What the stage before sent; Megatron's schedules call it by this name."""
        self._received = received[0]

    def forward(self, batch: RowInput) -> Tensor | tuple[Tensor, Tensor]:
        """Hidden states [t, 1, h], or on the last stage log-probabilities and entropies of this rank's tokens."""
        drawn_for.set((batch.row.update, batch.row.number))
        x = self._entrance(batch)
        with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda) if self.offloads else nullcontext():
            x = self._through_layers(x, batch.row)
        if not self.place.is_last:
            return x.unsqueeze(1)
        log_probabilities, entropy = self.output(self.final_norm(x), batch.labels)
        return log_probabilities, entropy

    def _entrance(self, batch: RowInput) -> Tensor:
        if self.place.is_first:
            embedded: Tensor = self.embedding(batch.tokens)
            # Under frozen weights, what a stage sends on still has to have a gradient.
            return embedded if embedded.requires_grad else embedded.requires_grad_(torch.is_grad_enabled())
        if self._received is None:
            raise RuntimeError("the stage before sent nothing")
        return self._received.squeeze(1)

    def _through_layers(self, x: Tensor, row: Row) -> Tensor:
        layers = [*self.layers.values()]
        for group, again in self.recompute:
            x = recomputed(again, partial(_through, [layers[index] for index in group]), x, row)
        return x


def _through(layers: Sequence[nn.Module], x: Tensor, row: Row) -> Tensor:
    for layer in layers:
        x = layer(x, row)
    return x


def mixture_settings(model: Architecture, spec: Spec) -> MixtureSettings:
    """What the experts of every layer are told."""
    if model.routing is None:
        raise ValueError(f"{model.shape.family} does not say how it chooses experts")
    if spec.moe.dispatcher is Dispatcher.FLEX:
        raise BadConfiguration("spec.moe.dispatcher Flex needs DeepEP, which this image does not have; use AllToAll")
    routing = replace(model.routing, dtype=getattr(torch, spec.moe.router_dtype.value))
    again = recomputed_modules(spec.training.recompute)
    return MixtureSettings(spec.moe, balancing(spec), routing, model.gate_limit, again)


def _norm(hidden: int, model: Architecture, share: TensorShare) -> RMSNorm:
    norm = RMSNorm(hidden, model.norm_epsilon)
    mark_partial(norm.weight, is_partial=share.sequence_parallel)
    return norm


def _attention(
    shape: LayerShape, model: Architecture, share: TensorShare, recompute: frozenset[RecomputeModule]
) -> nn.Module:
    settings = AttentionSettings(model.attention_scale, model.norm_epsilon, recompute)
    match shape.attention:
        case GroupedAttention() as grouped:
            return Attention(grouped, model.shape.hidden, share, settings)
        case LatentShape() as latent:
            return LatentAttention(latent, model.shape.hidden, share, settings)
        case other:
            raise NotImplementedError(f"{type(other).__name__} cannot be trained yet")
