"""The part of the model that one pipeline stage (or one of its chunks) holds: from tokens or hidden states to hidden
states or log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from moejob_api.job.job import Spec
from moejob_api.memory.constants import LOSS_CHUNK_TOKENS
from moejob_api.models.shape import ModelShape
from moejob_trainer.groups import Groups
from moejob_trainer.layers.vocabulary import token_log_probabilities
from moejob_trainer.model.adapters import drawn_for
from moejob_trainer.model.adapting import adapt
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.further import FurtherToken
from moejob_trainer.model.layer import Layer, norm
from moejob_trainer.model.linear import TensorShare, mark_tied
from moejob_trainer.model.offload import Offloading
from moejob_trainer.model.parameters import padded_vocabulary, parameters
from moejob_trainer.model.recompute import recomputed, recomputed_groups
from moejob_trainer.model.row import Row


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Which layers a stage holds, and whether it stands at an end of the model."""

    layers: range
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True, eq=False)
class Further:
    """What a module that predicts a further token sees of a row: that token, the one behind it, and where both are."""

    tokens: Tensor
    labels: Tensor
    is_real: Tensor


@dataclass(frozen=True, slots=True)
class RowInput:
    """This rank's part of one packed row; `further` for each module that predicts a further token."""

    tokens: Tensor
    labels: Tensor
    row: Row
    further: tuple[Further, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """What the last stage says of this rank's tokens, and while it learns of each further one. float32 [rows]"""

    log_probabilities: Tensor
    entropy: Tensor
    further: tuple[Tensor, ...]


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
        self.layers = nn.ModuleDict(
            {str(index): Layer(shape.layers[index], model, spec, groups) for index in place.layers}
        )
        if place.is_first or (place.is_last and self.shares_embedding):
            self.embedding = Embedding(shape, self.share)
            if self.shares_embedding:
                mark_tied(self.embedding.weight, is_copy=not place.is_first)
        if place.is_last:
            self.final_norm = norm(shape.hidden, model, self.share)
            self.output = Head(shape, self.share, temperature)
            self.mtp = nn.ModuleList([FurtherToken(layer, model, spec, groups) for layer in shape.mtp_layers])
            if shape.tied_embeddings:
                self.output.weight = self.embedding.weight
        self.recompute = recomputed_groups(spec.training.recompute, len(place.layers))
        self.offloads = spec.memory.offload_activations
        self._received: Tensor | None = None
        if spec.training.lora is not None:
            declared = {parameter.name: parameter for parameter in parameters(shape)}
            adapt(self, declared, spec.training.lora, spec.training.seed)

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage needs the embedding too: as its output layer, or for further tokens."""
        return self.model.shape.tied_embeddings or len(self.model.shape.mtp_layers) > 0

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """The layers by their numbers in the whole model; those that predict further tokens come behind the last."""
        yield from ((int(index), layer) for index, layer in self.layers.items())
        if self.place.is_last:
            yield from enumerate((module.layer for module in self.mtp), len(self.model.shape.layers))

    def set_input_tensor(self, received: Sequence[Tensor | None]) -> None:
        """What the stage before sent; Megatron's schedules call it by this name."""
        self._received = received[0]

    def forward(self, batch: RowInput) -> Tensor | Said:
        """Hidden states [t, 1, h], or what the last stage says."""
        drawn_for.set((batch.row.update, batch.row.number))
        x = self._entrance(batch)
        x = self._through_layers(x, batch.row)
        if not self.place.is_last:
            return x.unsqueeze(1)
        hidden = self.final_norm(x)
        log_probabilities, entropy = self.output(hidden, batch.labels)
        return Said(log_probabilities, entropy, self._further(hidden, batch))

    def _further(self, hidden: Tensor, batch: RowInput) -> tuple[Tensor, ...]:
        """Of each further token; nothing where nothing is learned."""
        said = []
        for module, further in zip(self.mtp, batch.further, strict=True) if torch.is_grad_enabled() else ():
            row = replace(batch.row, is_real=further.is_real)
            embedded = self.embedding(further.tokens)
            with self._offloading(module, row):
                hidden = module(hidden, embedded, row)
            said.append(self.output(hidden, further.labels)[0])
        return tuple(said)

    def _offloading(self, module: nn.Module, row: Row) -> AbstractContextManager[object]:
        # All layers turn their queries and keys by the same angles.
        return Offloading(module, [row.cosine, row.sine]) if self.offloads else nullcontext()

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
            x = recomputed(again, partial(self._through, [layers[index] for index in group]), x, row)
        return x

    def _through(self, layers: Sequence[nn.Module], x: Tensor, row: Row) -> Tensor:
        for layer in layers:
            with self._offloading(layer, row):
                x = layer(x, row)
        return x
