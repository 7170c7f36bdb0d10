"""Weights, gradients and optimizer state of one pipeline stage, on the GPU and in host memory.

Bytes of a trained parameter in bfloat16 with float32 gradients and moments, over R replicas:

    DistributedOptimizer   2 weight + 4 gradient + 10/R optimizer (2 moments of 4, and 2 that bfloat16 lacks of float32)
    FSDP, ZeRO2           (4 weight + 4 gradient + 8 optimizer) / R, and the weights gathered to compute with

With eight replicas that is 7.25 bytes, or 2 bytes and the gathered layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.arithmetic import ceil_div
from moejob_api.derived import has_float8_products, has_shared_roundings
from moejob_api.job.resources import Accelerator
from moejob_api.planner.memory.case import (
    HeldParameters,
    LocalParameters,
    PlanningCase,
    layer_parameters,
    output_parameters,
)
from moejob_api.planner.memory.constants import FSDP_UNITS, ROUNDINGS, UPDATE_ELEMENTS
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES
from moejob_api.planner.memory.kinds import StageContents
from moejob_api.planner.memory.temporaries import largest_matrix
from moejob_api.planner.memory.whole_layers import whole_parameters


@dataclass(frozen=True, slots=True)
class StageStates:
    """Bytes of one stage on one GPU; host is the part of the optimizer in host memory.

    gathered: whole weights and gradients of the layers at work, where replicas divide them. rounded: FP8 copies of
    weights. step: temporary tensors of the optimizer's update.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    rounded: int
    step: int
    host: int


def stage_states(case: PlanningCase, stage: StageContents, part: HeldParameters) -> StageStates:
    """Return the bytes that a stage with these parameters holds between and during steps."""
    local_trained = divided_parameters(case, part.trained)
    on_host = case.spec.memory.offload_optimizer
    held, trained, gathered = part.held.total, part.trained.total, 0
    if case.has_weight_shards:
        held, trained = divided_parameters(case, part.held), local_trained
        gathered = (
            _whole_model_bytes(case, part) if case.has_weights_until_update else _gathered_layer_bytes(case, stage)
        )
    return StageStates(
        weights=(held - trained) * case.frozen_bytes + trained * case.weight_bytes,
        gradients=trained * case.summed_bytes,
        optimizer=round(local_trained * optimizer_bytes(case) * (1 - on_host)),
        gathered=gathered,
        rounded=_rounded_bytes(case, stage),
        step=_update_bytes(case, local_trained),
        host=_host_bytes(case, local_trained),
    )


def divided_parameters(case: PlanningCase, parameters: LocalParameters) -> int:
    """Parameters of a GPU when they are divided over the ranks that share them."""
    layout = case.layout
    return ceil_div(parameters.dense, layout.data * layout.context) + ceil_div(parameters.routed, layout.expert_data)


def optimizer_bytes(case: PlanningCase) -> int:
    """Bytes of optimizer state for each trained parameter: two moments, and the bits that weights lack of float32."""
    return FLOAT32_BYTES - case.weight_bytes + _moment_bytes(case)


def _host_bytes(case: PlanningCase, local_trained: int) -> int:
    """Bytes of an optimizer on the host: two moments, float32 weights, and buffers for copies to and from the GPU."""
    on_host = local_trained * case.spec.memory.offload_optimizer
    moments = _moment_bytes(case)
    # Narrower moments are widened for the update, a buffer at a time.
    scratch = 2 * FLOAT32_BYTES if moments < 2 * FLOAT32_BYTES else 0
    buffers = 1 + case.spec.training.communication.overlap_optimizer_copies
    exchanged = min(on_host, UPDATE_ELEMENTS) * (FLOAT32_BYTES + case.weight_bytes + scratch)
    # With float32 moments 4 + 8 = 12 bytes a parameter, beside the buffers.
    return round(on_host * (FLOAT32_BYTES + moments) + buffers * exchanged)


def _moment_bytes(case: PlanningCase) -> int:
    return 2 * case.spec.training.precision.moments.size_bytes


def _update_bytes(case: PlanningCase, local_trained: int) -> int:
    """float32 copies in an update on the CPU, of gradients and of narrower moments and weights; a GPU makes none."""
    if case.spec.resources.accelerator is Accelerator.GPU:
        return 0
    moments = 2 * FLOAT32_BYTES if _moment_bytes(case) < 2 * FLOAT32_BYTES else 0
    main = FLOAT32_BYTES if case.weight_bytes < FLOAT32_BYTES else 0
    largest = max(largest_matrix(layer, case.share) for layer in case.kinds.layers)
    return min(local_trained, max(UPDATE_ELEMENTS, largest, case.vocabulary)) * (FLOAT32_BYTES + main + moments)


def _rounded_bytes(case: PlanningCase, stage: StageContents) -> int:
    """Two FP8 copies of all layers where micro batches share them, a byte an element; else one copy of one matrix."""
    if not has_float8_products(case.spec):
        return 0
    if has_shared_roundings(case.spec, case.layout):
        return ROUNDINGS * layer_parameters(case, stage).held.total
    return max(largest_matrix(layer, case.share) for layer in case.kinds.layers)


def _whole_model_bytes(case: PlanningCase, part: HeldParameters) -> int:
    """All weights, from the first forward pass of a step to its update, and the gradients of the largest layer.

    Gradients are there twice: as the backward pass computes them, and in the order in which replicas sum them.
    """
    layer = max(part.trained.total for part in case.layers)
    return part.held.total * case.element_bytes + max(layer, output_parameters(case)) * (
        case.element_bytes + case.gradient_bytes
    )


def _gathered_layer_bytes(case: PlanningCase, stage: StageContents) -> int:
    """Return the peak of the gathered tensors: in the backward pass of the largest layer, or after the first layer's.

    During a layer's backward pass a GPU holds the layer's weights, the weights of the next layer, which arrive
    meanwhile, the layer's gradients, and a copy of the gradients in the order in which replicas sum them. Gradients of
    experts need no copy; memory for two matrices of one size holds them.
    Until the update a GPU holds the matrices of the vocabulary, whose gradients are summed last, and the dense weights
    of the layers that stay whole.
    """
    ends = stage.embedding + (stage.output and not case.shape.tied_embeddings)
    matrices, trained_ends = ends * case.vocabulary, ends * output_parameters(case)
    passing = max(
        part.held.total * FSDP_UNITS * case.element_bytes
        + part.trained.dense * (case.element_bytes + case.gradient_bytes)
        + part.trained.routed * FSDP_UNITS * case.gradient_bytes
        for part in case.layers
    )
    kept_parameters = matrices + trained_ends + whole_parameters(case)
    return kept_parameters * case.element_bytes + max(passing, trained_ends * case.gradient_bytes)
