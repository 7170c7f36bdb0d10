"""One job on one layout, prepared: everything that the estimates of its stages have in common.

Parameters of a matrix on one GPU:

    dense     ceil(divided by tensor / tensor) + replicated
    routed    ceil(all experts / (expert x expert tensor))
"""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.arithmetic import ceil_div, round_up
from moejob_api.derived import UpdateBatch, has_frozen_router, share_dtype, trained_shape, update_batch
from moejob_api.job import Spec
from moejob_api.job.moe import Sharding
from moejob_api.layout.sizes import Layout
from moejob_api.models.parameters import ParameterCounts, layer_weights, mtp_weights
from moejob_api.models.shape import Layer, ModelShape
from moejob_api.planner.memory.adapters import adapter_weights
from moejob_api.planner.memory.constants import VOCABULARY_MULTIPLE
from moejob_api.planner.memory.kinds import (
    LayerKinds,
    StageContents,
    distinct_stages,
    layers_by_kind,
    router_parameters,
)
from moejob_api.planner.memory.microbatch_share import (
    ActivationSettings,
    MicrobatchShare,
    activation_settings,
    microbatch_share,
)


@dataclass(frozen=True, slots=True)
class LocalParameters:
    """Parameters on one GPU: dense parameters, shared by all data-parallel ranks, and routed ones, shared by fewer."""

    dense: int = 0
    routed: int = 0

    def __add__(self, other: LocalParameters) -> LocalParameters:
        return LocalParameters(self.dense + other.dense, self.routed + other.routed)

    def __mul__(self, count: int) -> LocalParameters:
        return LocalParameters(self.dense * count, self.routed * count)

    def __floordiv__(self, parts: int) -> LocalParameters:
        return LocalParameters(self.dense // parts, self.routed // parts)

    @property
    def total(self) -> int:
        """Parameters of both sorts."""
        return self.dense + self.routed


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """Parameters that one GPU holds, and the trained ones among them."""

    held: LocalParameters = LocalParameters()
    trained: LocalParameters = LocalParameters()

    def __add__(self, other: HeldParameters) -> HeldParameters:
        return HeldParameters(self.held + other.held, self.trained + other.trained)

    def __mul__(self, count: int) -> HeldParameters:
        return HeldParameters(self.held * count, self.trained * count)


@dataclass(frozen=True, slots=True)
class PlanningCase:
    """A job on a layout. layers: parameters of one layer of each kind on one GPU; vocabulary: of the embedding."""

    spec: Spec
    shape: ModelShape
    layout: Layout
    kinds: LayerKinds
    share: MicrobatchShare
    activation_settings: ActivationSettings
    batch: UpdateBatch
    stages: tuple[StageContents, ...]
    layers: tuple[HeldParameters, ...]
    vocabulary: int

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight that computes, and of an activation."""
        return self.share.element_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is kept."""
        return share_dtype(self.spec).size_bytes if self.has_weight_shards else self.element_bytes

    @property
    def frozen_bytes(self) -> int:
        """Bytes of a weight below adapters. No update changes it, so replicas that divide it need no float32."""
        return self.weight_bytes if self.spec.training.lora is None else self.element_bytes

    @property
    def summed_bytes(self) -> int:
        """Bytes of a gradient that is kept: shares of weights have gradients of their own type."""
        return self.weight_bytes if self.has_weight_shards else self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that travels to be summed."""
        return self.spec.training.precision.gradients.size_bytes

    @property
    def has_weight_shards(self) -> bool:
        """Return whether weights and gradients are divided like the optimizer's state."""
        return self.spec.memory.sharding.has_weight_shards

    @property
    def has_weights_until_update(self) -> bool:
        """Return whether gathered weights stay until the update."""
        return self.spec.memory.sharding is Sharding.ZERO2


def prepare_case(spec: Spec, shape: ModelShape, layout: Layout, kinds: LayerKinds | None = None) -> PlanningCase:
    """Prepare a job on a layout; `kinds` spares grouping the layers again for each of many layouts of one model."""
    shape, grouped_layers = trained_shape(shape, spec), kinds or layers_by_kind(shape)
    rank_batch = update_batch(spec, layout)
    return PlanningCase(
        spec=spec,
        shape=shape,
        layout=layout,
        kinds=grouped_layers,
        share=microbatch_share(spec, shape, layout, rank_batch.micro_tokens),
        activation_settings=activation_settings(spec),
        batch=rank_batch,
        stages=distinct_stages(spec.parallelism, grouped_layers),
        layers=tuple(
            [
                _layer_parameters(spec, layout, shape.hidden, layer, weights)
                for layer, weights in zip(grouped_layers.layers, grouped_layers.weights, strict=True)
            ]
        ),
        vocabulary=round_up(shape.vocabulary, VOCABULARY_MULTIPLE * layout.tensor) // layout.tensor * shape.hidden,
    )


def stage_parameters(case: PlanningCase, stage: StageContents) -> HeldParameters:
    """Parameters on one GPU of a stage."""
    total = layer_parameters(case, stage)
    ends = LocalParameters(dense=_end_parameters(case, stage))
    total += HeldParameters(ends, LocalParameters() if case.spec.training.lora else ends)
    return total + _mtp_parameters(case) if stage.output and case.shape.mtp_layers else total


def layer_parameters(case: PlanningCase, stage: StageContents) -> HeldParameters:
    """Parameters on one GPU of a stage's layers, without what is in front of the first and behind the last."""
    total = HeldParameters()
    for chunk in stage.chunks:
        for part, count in zip(case.layers, case.kinds.count_layers(chunk.start, chunk.stop), strict=True):
            if count:
                total += part * count
    return total


def model_parameters(case: PlanningCase) -> HeldParameters:
    """Parameters of all layers together, divided as on one GPU of a single stage."""
    total = HeldParameters()
    for part, layers_before in zip(case.layers, case.kinds.before, strict=True):
        total += part * layers_before[-1]
    return total


def output_parameters(case: PlanningCase) -> int:
    """Trained parameters of the output projection on one GPU of the last stage."""
    return 0 if case.spec.training.lora else case.vocabulary


def _end_parameters(case: PlanningCase, stage: StageContents) -> int:
    """The embedding, the output projection and the norm before it, as far as the stage has them."""
    is_single_stage = case.layout.pipeline == 1
    output = case.vocabulary + case.shape.hidden if stage.output else 0
    if is_single_stage and case.shape.tied_embeddings:
        return output
    # Predicting further tokens embeds them where the output is.
    embeds_there = (
        stage.output and not is_single_stage and not case.shape.tied_embeddings and len(case.shape.mtp_layers) > 0
    )
    return output + (int(stage.embedding) + int(embeds_there)) * case.vocabulary


def _mtp_parameters(case: PlanningCase) -> HeldParameters:
    """The layers that predict further tokens, with the projection of embedding and hidden state in front of each."""
    beside = mtp_weights(case.shape)
    layers = HeldParameters()
    for layer in case.shape.mtp_layers:
        weights = layer_weights(case.shape, layer)
        layers += _layer_parameters(case.spec, case.layout, case.shape.hidden, layer, weights)
        beside += weights * -1
    beside_parameters = local_parameters(beside, case.layout)
    return layers + HeldParameters(beside_parameters, beside_parameters)


def _layer_parameters(
    spec: Spec, layout: Layout, hidden: int, layer: Layer, weights: ParameterCounts
) -> HeldParameters:
    held = local_parameters(weights, layout)
    lora = spec.training.lora
    if lora is not None:
        adapters = local_parameters(adapter_weights(hidden, layer, lora), layout)
        return HeldParameters(held + adapters, adapters)
    frozen = router_parameters(hidden, layer) if has_frozen_router(spec) else 0
    return HeldParameters(held, LocalParameters(held.dense - frozen, held.routed))


def local_parameters(weights: ParameterCounts, layout: Layout) -> LocalParameters:
    """Parameters of `weights` on one GPU.

    Megatron divides the projections of keys and values by columns, even where ranks outnumber heads. Then ranks hold
    copies of the activations, never of the weights.
    """
    return LocalParameters(
        dense=ceil_div(weights.tensor + weights.key_value, layout.tensor) + weights.replicated,
        routed=ceil_div(weights.routed, layout.expert * layout.expert_tensor),
    )
