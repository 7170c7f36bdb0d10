"""The part of the model that one pipeline stage (or one of its chunks) holds: from tokens or hidden states to hidden
states or log-probabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from moejob_api.derived import kept_slope_bytes
from moejob_api.job.job import Spec
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.constants import LOSS_CHUNK_TOKENS
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.layers.vocabulary import likeliest_tokens, token_log_probabilities
from moejob_trainer.model.adapter_placement import add_adapters
from moejob_trainer.model.adapters import dropout_key
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.layer import TransformerLayer, make_norm
from moejob_trainer.model.linear import TensorShare, mark_tied
from moejob_trainer.model.moe_layer import MoELayer
from moejob_trainer.model.multi_token_prediction import MTPModule
from moejob_trainer.model.offload import OffloadedPass
from moejob_trainer.model.packed_batch import PackedBatch
from moejob_trainer.model.parameters import model_parameters, padded_vocabulary
from moejob_trainer.model.recompute import maybe_recompute, recomputed_groups

# Of a layer's number and the states into and out of it, and of the states into the final norm. [t, h]
KeepLayer = Callable[[int, Tensor, Tensor], None]
KeepFinal = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The layers of a stage, and whether it stands at an end of the model."""

    layers: range
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True, eq=False)
class MTPInput:
    """Input of an MTP module: a later token of each position, the one behind that, and where both exist."""

    tokens: Tensor
    labels: Tensor
    is_real: Tensor


@dataclass(frozen=True, slots=True)
class StageInput:
    """This rank's part of one packed row; `mtp` has one input for each MTP module."""

    tokens: Tensor
    labels: Tensor
    packed: PackedBatch
    mtp: tuple[MTPInput, ...] = ()
    # Instead of its probability the likeliest token, wherever the label is not negative.
    is_asked: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StageOutput:
    """Output of the last stage for this rank's tokens, and in training for each MTP depth. float32 [rows]

    likeliest: tokens, int64 [rows], where the stage was asked for them; -1 where it was not.
    """

    log_probabilities: Tensor
    entropy: Tensor
    mtp: tuple[Tensor, ...] = ()
    likeliest: Tensor | None = None


class Embedding(nn.Module):
    """The rows of the vocabulary that this tensor rank holds."""

    def __init__(self, shape: ModelShape, share: TensorShare) -> None:
        super().__init__()
        self.share = share
        rows = share.local_size(padded_vocabulary(shape), "padded vocabulary")
        self.first = rows * share.group.rank
        self.weight = nn.Parameter(torch.empty(rows, shape.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows] -> [t, h]"""
        local_ids = tokens - self.first
        is_here = (local_ids >= 0) & (local_ids < len(self.weight))
        embedded = functional.embedding(local_ids * is_here, self.weight)
        return self.share.reduce_output(embedded * is_here.unsqueeze(-1))


class Head(nn.Module):
    """Final norm and output layer: log-probability and entropy for the label of every token."""

    def __init__(self, shape: ModelShape, share: TensorShare, spec: Spec) -> None:
        super().__init__()
        self.vocabulary, self.share = shape.vocabulary, share
        self.temperature = 1.0 if spec.grpo is None else spec.grpo.temperature
        self.learns_entropy = spec.grpo is not None and spec.grpo.entropy_coefficient > 0
        self._spec = spec
        rows = share.local_size(padded_vocabulary(shape), "padded vocabulary")
        self.weight = nn.Parameter(torch.empty(rows, shape.hidden))

    def forward(
        self, x: Tensor, labels: Tensor, *, is_asked: bool = False
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """[t, h], [rows] -> log-probability and entropy of every token, float32 [rows]

        Asked for tokens: zeros, and the likeliest token behind each label that is not negative.
        """
        if is_asked:
            return self._predict_tokens(self.share.gather_input(x), labels)
        return token_log_probabilities(
            self.share.gather_input(x),
            self.weight,
            labels,
            vocabulary=self.vocabulary,
            keeps_slopes=kept_slope_bytes(self._spec, len(labels), len(self.weight), x.element_size()) > 0,
            learns_entropy=self.learns_entropy,
            group=self.share.group.handle,
            chunk_tokens=LOSS_CHUNK_TOKENS,
            temperature=self.temperature,
            sums_hidden_gradient=False,
        )

    def _predict_tokens(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        is_wanted = labels >= 0
        tokens = torch.full_like(labels, -1)
        tokens[is_wanted] = likeliest_tokens(
            x[is_wanted],
            self.weight,
            vocabulary=self.vocabulary,
            chunk_tokens=LOSS_CHUNK_TOKENS,
            group=self.share.group.handle,
        )
        zeros = torch.zeros(len(labels), device=x.device)
        return zeros, zeros, tokens


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A part of a stage's tensor that lies in one tensor of the whole model.

    `rows` are rows of that tensor as this rank holds it; None where the part is all of them.
    """

    name: str
    rows: slice | None = None


class ModelStage(nn.Module, ABC):
    """One pipeline stage of any implementation, or one of its chunks, as the engine sees it.

    `config` and `model_type` are what Megatron's schedules read.
    """

    output: Head
    config: Any
    model_type: Any
    # Of our own layers only.
    embedding: Any
    final_norm: Any
    layers: Any

    def __init__(self, model: Architecture, groups: Groups, place: StagePlace) -> None:
        super().__init__()
        self.model, self.place, self.groups = model, place, groups

    @property
    def shares_embedding(self) -> bool:
        """Return whether the last stage needs the embedding too: as its output layer, or for MTP modules."""
        return self.model.shape.tied_embeddings or len(self.model.shape.mtp_layers) > 0

    @property
    @abstractmethod
    def embedding_module(self) -> nn.Module:
        """The module of a first stage that turns tokens into the states that enter its first layer."""

    @property
    @abstractmethod
    def embedding_weight(self) -> nn.Parameter:
        """The embedding of the first stage, or its copy on the last one."""

    @abstractmethod
    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """The layers by their numbers in the whole model; those of MTP modules come behind the last."""

    @abstractmethod
    def router_weights(self) -> Iterator[nn.Parameter]:
        """The weights that choose experts."""

    @abstractmethod
    def stored_parts(self, name: str) -> Sequence[WeightPart]:
        """Return where one of this stage's tensors lies in the whole model, part behind part."""

    @abstractmethod
    def weight_parts(self) -> Iterator[tuple[WeightPart, Tensor]]:
        """Return all parameters and buffers as parts of the whole model; writing to one sets the weight."""

    @abstractmethod
    def watch_layers(self, keep_layer: KeepLayer, keep_final: KeepFinal) -> list[RemovableHandle]:
        """Call back with the states into and out of each layer, and into the final norm, until handles are removed."""

    @abstractmethod
    def set_input_tensor(self, received: Sequence[Tensor | None]) -> None:
        """Take the output of the stage before; Megatron's schedules call it by this name."""


class Stage(ModelStage):
    """One pipeline stage of our own layers, or one of its chunks."""

    def __init__(self, model: Architecture, spec: Spec, groups: Groups, place: StagePlace) -> None:
        super().__init__(model, groups, place)
        self.share = TensorShare(groups.tensor, spec.parallelism.sequence_parallel)
        shape = model.shape
        self.layers = nn.ModuleDict(
            {str(index): TransformerLayer(shape.layers[index], model, spec, groups, index) for index in place.layers}
        )
        if place.is_first or (place.is_last and self.shares_embedding):
            self.embedding = Embedding(shape, self.share)
            if self.shares_embedding:
                mark_tied(self.embedding.weight, is_copy=not place.is_first)
        if place.is_last:
            self.final_norm = make_norm(shape.hidden, model, self.share)
            self.output = Head(shape, self.share, spec)
            self.mtp = nn.ModuleList([MTPModule(layer, model, spec, groups) for layer in shape.mtp_layers])
            if shape.tied_embeddings:
                self.output.weight = self.embedding.weight
        self.recompute = recomputed_groups(spec.training.recompute, len(place.layers))
        self.offloads = spec.memory.offload_activations
        self._received: Tensor | None = None
        if spec.training.lora is not None:
            declared = {parameter.name: parameter for parameter in model_parameters(shape)}
            add_adapters(self, declared, spec.training.lora, spec.training.seed)

    @property
    def embedding_module(self) -> nn.Module:
        """The module of a first stage that turns tokens into the states that enter its first layer."""
        return self.embedding

    @property
    def embedding_weight(self) -> nn.Parameter:
        """The embedding of the first stage, or its copy on the last one."""
        return self.embedding.weight

    def router_weights(self) -> Iterator[nn.Parameter]:
        """The weights that choose experts."""
        for module in self.modules():
            if isinstance(module, MoELayer):
                yield from module.router.parameters()

    def stored_parts(self, name: str) -> Sequence[WeightPart]:
        """Return the tensor's own name: the last stage of a tied model holds a copy of the first one's embedding."""
        is_tied = name == "output.weight" and self.model.shape.tied_embeddings
        return [WeightPart("embedding.weight" if is_tied else name)]

    def weight_parts(self) -> Iterator[tuple[WeightPart, Tensor]]:
        """Return all parameters and buffers; the parameters themselves carry their division over replicas."""
        for name, tensor in self.state_dict(keep_vars=True).items():
            yield self.stored_parts(name)[0], tensor

    def watch_layers(self, keep_layer: KeepLayer, keep_final: KeepFinal) -> list[RemovableHandle]:
        """Call back with the states into and out of each layer, and into the final norm, until handles are removed."""

        def keep_states(index: int, _: nn.Module, inputs: Sequence[Any], output: Tensor) -> None:
            keep_layer(index, inputs[0].detach(), output.detach())

        handles = [
            layer.register_forward_hook(partial(keep_states, int(index))) for index, layer in self.layers.items()
        ]
        if self.place.is_last:
            handles.append(self.final_norm.register_forward_pre_hook(lambda _, inputs: keep_final(inputs[0].detach())))
        return handles

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """The layers by their numbers in the whole model; those of MTP modules come behind the last."""
        yield from ((int(index), layer) for index, layer in self.layers.items())
        if self.place.is_last:
            yield from enumerate((module.layer for module in self.mtp), len(self.model.shape.layers))

    def set_input_tensor(self, received: Sequence[Tensor | None]) -> None:
        """Take the output of the stage before; Megatron's schedules call it by this name."""
        self._received = received[0]

    def forward(self, batch: StageInput) -> Tensor | StageOutput:
        """Hidden states [t, 1, h], or the outputs of the last stage."""
        dropout_key.set((batch.packed.update, batch.packed.number))
        x = self._enter_stage(batch)
        x = self._run_layers(x, batch.packed)
        if not self.place.is_last:
            return x.unsqueeze(1)
        hidden = self.final_norm(x)
        if batch.is_asked:
            zeros, _, tokens = self.output(hidden, batch.labels, is_asked=True)
            return StageOutput(zeros, zeros, likeliest=tokens)
        log_probabilities, entropy = self.output(hidden, batch.labels)
        return StageOutput(log_probabilities, entropy, self._mtp_outputs(hidden, batch))

    def _mtp_outputs(self, hidden: Tensor, batch: StageInput) -> tuple[Tensor, ...]:
        """Return the log-probabilities of each MTP depth; none in a pass that neither learns nor counts choices."""
        if not torch.is_grad_enabled() and not batch.packed.counts_choices:
            return ()
        outputs = []
        for module, mtp in zip(self.mtp, batch.mtp, strict=True):
            packed = replace(batch.packed, is_real=mtp.is_real)
            embedded = self.embedding(mtp.tokens)
            with self._offload_layers(packed) as offload, offload(module):
                hidden = module(hidden, embedded, packed)
            outputs.append(self.output(hidden, mtp.labels)[0])
        return tuple(outputs)

    @contextmanager
    def _offload_layers(self, packed: PackedBatch) -> Iterator[Callable[[nn.Module], AbstractContextManager[object]]]:
        """Yield what each layer of one pass is computed in."""
        if not self.offloads:
            yield lambda _: nullcontext()
            return
        # All layers turn their queries and keys by the same angles.
        with OffloadedPass([packed.cosine, packed.sine]) as offloaded:
            yield offloaded.offload_module

    def _enter_stage(self, batch: StageInput) -> Tensor:
        if self.place.is_first:
            embedded: Tensor = self.embedding(batch.tokens)
            # Under frozen weights, what a stage sends on still has to have a gradient.
            return embedded if embedded.requires_grad else embedded.requires_grad_(torch.is_grad_enabled())
        if self._received is None:
            raise RuntimeError("the stage before sent nothing")
        return self._received.squeeze(1)

    def _run_layers(self, x: Tensor, packed: PackedBatch) -> Tensor:
        layers = [*self.layers.values()]
        for group, is_recomputed in self.recompute:
            x = maybe_recompute(is_recomputed, partial(self._run_group, [layers[index] for index in group]), x, packed)
        return x

    def _run_group(self, layers: Sequence[nn.Module], x: Tensor, packed: PackedBatch) -> Tensor:
        with self._offload_layers(packed) as offload:
            for layer in layers:
                with offload(layer):
                    x = layer(x, packed)
        return x
