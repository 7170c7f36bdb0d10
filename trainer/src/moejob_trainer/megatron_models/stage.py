"""A chunk of Megatron's `GPTModel` as a stage of the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moejob_api.job.job import Spec
from moejob_trainer.conversion.tensor_table import slice_lengths
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron.weights import part_slices, rank_coordinates
from moejob_trainer.megatron_models.modules import DocumentRotary, PackedDocuments
from moejob_trainer.megatron_models.names import find_stored_parts
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.linear import TensorShare, is_expert, mark_partial, mark_tied
from moejob_trainer.model.parameters import Parameter, divided_axes, model_parameters
from moejob_trainer.model.stage import (
    Head,
    KeepFinal,
    KeepLayer,
    ModelStage,
    StageInput,
    StageOutput,
    StagePlace,
    WeightPart,
)


class MegatronStage(ModelStage):
    """One pipeline stage of Megatron's layers, or one of its chunks."""

    def __init__(self, gpt: GPTModel, model: Architecture, spec: Spec, groups: Groups, place: StagePlace) -> None:
        super().__init__(model, groups, place)
        self.gpt = gpt
        self._declared = {parameter.name: parameter for parameter in model_parameters(model.shape)}
        gpt.rotary_pos_emb = DocumentRotary(gpt.rotary_pos_emb, model.rotary)
        if place.is_last:
            share = TensorShare(groups.tensor, spec.parallelism.sequence_parallel)
            with torch.device("meta"):
                self.output = Head(model.shape, share, spec)
            self.output.weight = gpt.shared_embedding_or_output_weight() if self._is_tied else gpt.output_layer.weight

    @property
    def _is_tied(self) -> bool:
        return self.model.shape.tied_embeddings

    @property
    def embedding_module(self) -> nn.Module:
        """The module of a first stage that turns tokens into the states that enter its first layer."""
        embedding: nn.Module = self.gpt.embedding
        return embedding

    @property
    def embedding_weight(self) -> nn.Parameter:
        """The embedding of the first stage, or its copy on the last one."""
        weight: nn.Parameter = self.gpt.shared_embedding_or_output_weight()
        return weight

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """The layers by their numbers in the whole model, which Megatron counts from 1."""
        return ((layer.layer_number - 1, layer) for layer in self.gpt.decoder.layers)

    def router_weights(self) -> Iterator[nn.Parameter]:
        """The weights that choose experts."""
        return (parameter for name, parameter in self.named_parameters() if ".router." in name)

    def stored_parts(self, name: str) -> Sequence[WeightPart]:
        """Return where one of Megatron's tensors lies in the whole model, in our own names."""
        return find_stored_parts(name, self.model.shape, self.place.layers, self.groups.tensor.size)

    def weight_parts(self) -> Iterator[tuple[WeightPart, Tensor]]:
        """Return all parameters and buffers as parts of the whole model; writing to one sets the weight."""
        place = rank_coordinates(self.groups)
        for name, tensor in self.gpt.state_dict(keep_vars=True).items():
            first = 0
            # Megatron's modules put None into their state, and places for metrics of their own.
            for part in self.stored_parts(name) if isinstance(tensor, Tensor) else ():
                if (parameter := self._declared.get(part.name)) is not None:
                    shape = slice_lengths(part_slices(part, parameter, place))
                    last = first + math.prod(shape)
                    yield part, tensor.detach().view(-1)[first:last].view(shape)
                    first = last

    def watch_layers(self, keep_layer: KeepLayer, keep_final: KeepFinal) -> list[RemovableHandle]:
        """Call back with the states into and out of each layer, and into the final norm, until handles are removed."""

        def keep_states(
            index: int, _: nn.Module, arguments: Sequence[Any], named: Mapping[str, Any], output: Any
        ) -> None:
            states = arguments[0] if arguments else named["hidden_states"]
            keep_layer(index, states.detach().squeeze(1), output[0].detach().squeeze(1))

        def keep_last(_: nn.Module, arguments: Sequence[Tensor]) -> None:
            keep_final(arguments[0].detach().squeeze(1))

        handles = [
            layer.register_forward_hook(partial(keep_states, index), with_kwargs=True)
            for index, layer in self.numbered_layers()
        ]
        if self.place.is_last:
            handles.append(self.gpt.decoder.final_layernorm.register_forward_pre_hook(keep_last))
        return handles

    def set_input_tensor(self, received: Sequence[Tensor | None]) -> None:
        """Take the output of the stage before; Megatron's schedules call it by this name."""
        self.gpt.set_input_tensor(received)

    def forward(self, batch: StageInput) -> Tensor | StageOutput:
        """Hidden states [t, 1, h], or the outputs of the last stage."""
        computed: Tensor | StageOutput = self.gpt(
            input_ids=batch.tokens[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=PackedDocuments(
                documents=batch.packed.documents, context_group=batch.packed.context_group
            ),
            output_processor=self._compute_outputs,
            output_processor_context=batch,
        )
        return computed

    def _compute_outputs(self, *, hidden_states: Tensor, context: StageInput, **_: Any) -> StageOutput:
        """Return the outputs for the labels; Megatron calls this behind its final norm, not its own output layer."""
        hidden = hidden_states.squeeze(1)
        if context.is_asked:
            zeros, _, tokens = self.output(hidden, context.labels, is_asked=True)
            return StageOutput(zeros, zeros, likeliest=tokens)
        return StageOutput(*self.output(hidden, context.labels))


def mark_parameters(stage: MegatronStage, declared: Mapping[str, Parameter]) -> None:
    """Mark the parameters whose gradient the optimizer has to sum: parts of tensor ranks, and copies of the embedding.

    BadConfiguration for a tensor that the published model lacks, or has in another shape: a setting of
    `model.transformer` has added or changed it.
    """
    place = rank_coordinates(stage.groups)
    for name, parameter in stage.named_parameters():
        declared_parts = [declared.get(part.name) for part in stage.stored_parts(name)]
        expected = sum(
            0 if parameter_of_model is None else math.prod(slice_lengths(part_slices(part, parameter_of_model, place)))
            for parameter_of_model, part in zip(declared_parts, stage.stored_parts(name), strict=True)
        )
        if expected != parameter.numel():
            raise BadConfiguration(
                f"Megatron's {name} of {tuple(parameter.shape)} has no place in this model, which has {expected} "
                "numbers there; leave out the key of model.transformer that changes it"
            )
        first = declared_parts[0]
        if first is not None and not divided_axes(first, place) and not is_expert(parameter):
            # Each tensor rank normalises its own heads, so its gradient of these weights is a part of the sum.
            is_of_heads = name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
            mark_partial(parameter, is_partial=is_of_heads or getattr(parameter, "sequence_parallel", False))
    if stage.shares_embedding and (stage.place.is_first or stage.place.is_last):
        mark_tied(stage.embedding_weight, is_copy=not stage.place.is_first)
