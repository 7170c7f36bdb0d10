"""Bytes on the volume: one checkpoint, one export, the model as it was downloaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moejob_api.derived import RECORDED_STEPS, has_frozen_router, trained_shape
from moejob_api.job import Spec
from moejob_api.job.base import Dtype
from moejob_api.job.grpo import Grpo
from moejob_api.job.training import Lora
from moejob_api.models.parameters import layer_kinds, mtp_parameters, total_parameters
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.adapters import adapter_weights
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES
from moejob_api.planner.memory.kinds import router_parameters
from moejob_api.planner.memory.routing_replay import step_choice_bytes

# Of a recorded token of an answer: its id, version and advantage, and log-probabilities of engine, trainer and
# reference model; of an answer beside its rewards and its places in updates; of a file.
# Of a token that a checkpoint keeps: its id, the engine's log-probability, the version of the weights.
_GROUP_TOKEN_BYTES = 12
_TOKEN_BYTES, _ID_BYTES, _ANSWER_BYTES, _REWARD_BYTES, _STEP_BYTES = 24, 4, 48, 8, 2**16


@dataclass(frozen=True, slots=True)
class VolumeNeed:
    """Bytes that a run writes to its volume at the most; `checkpoint` is the size of one."""

    checkpoint: int
    checkpoints: int
    export: int
    download: int
    # Of grpo.recordTokens.
    tokens: int = 0

    @property
    def bytes(self) -> int:
        """All of it together."""
        return self.checkpoint * self.checkpoints + self.export + self.download + self.tokens

    def least_need(self, spec: Spec) -> VolumeNeed:
        """Return what every run writes: one checkpoint, and the export where that is the model and no adapters."""
        return replace(
            self, checkpoints=1, download=0, tokens=0, export=self.export if spec.training.lora is None else 0
        )


def volume_need(shape: ModelShape, spec: Spec) -> VolumeNeed:
    """The need of a run; one checkpoint more than are kept, for the oldest goes only when the newest is complete."""
    return VolumeNeed(
        checkpoint=checkpoint_bytes(shape, spec) + finished_group_bytes(shape, spec),
        checkpoints=spec.checkpoint.keep + (spec.checkpoint.keep_best or 0) + 1,
        export=export_bytes(shape, spec) * (spec.checkpoint.export_hugging_face + spec.checkpoint.export_megatron),
        download=download_bytes(shape, spec),
        tokens=recorded_bytes(spec),
    )


def finished_group_bytes(shape: ModelShape, spec: Spec) -> int:
    """Groups that engines have finished for later steps and a checkpoint keeps, with the experts of routingReplay."""
    grpo = spec.grpo
    if grpo is None:
        return 0
    tokens = grpo.answers_per_step * spec.data.max_length
    return grpo.rollout.staleness * (tokens * _GROUP_TOKEN_BYTES + step_choice_bytes(spec, grpo, shape))


def checkpoint_bytes(shape: ModelShape, spec: Spec) -> int:
    """One checkpoint: the weights, and for each trained parameter its float32 copy and two moments.

    Under adapters, weights are held only where another job may have trained them.
    """
    lora = spec.training.lora
    shape = trained_shape(shape, spec)
    model_parameters = total_parameters(shape) + mtp_parameters(shape)
    adapters = 0 if lora is None else _adapter_parameters(shape, lora)
    trained = model_parameters - _frozen_parameters(shape, spec) if lora is None else adapters
    master = 0 if spec.model.dtype is Dtype.FLOAT32 else FLOAT32_BYTES
    state = master + 2 * spec.training.precision.moments.size_bytes
    held = adapters if lora is not None and spec.checkpoint.resume_from is None else model_parameters + adapters
    return held * spec.model.dtype.size_bytes + trained * state


def export_bytes(shape: ModelShape, spec: Spec) -> int:
    """The exported model; adapters are merged into it."""
    shape = trained_shape(shape, spec)
    return (total_parameters(shape) + mtp_parameters(shape)) * spec.model.dtype.size_bytes


def download_bytes(shape: ModelShape, spec: Spec) -> int:
    """Files of a model from the hub, or of a converted checkpoint, in bfloat16 as a rule; 0 for a model's folder."""
    if spec.model.is_folder and spec.model.config is None:
        return 0
    return (total_parameters(shape) + mtp_parameters(shape)) * Dtype.BFLOAT16.size_bytes


def recorded_bytes(spec: Spec) -> int:
    """Files of recorded tokens: of steps whose prompts and answers are all as long as they may be."""
    grpo = spec.grpo
    if grpo is None or not grpo.record_tokens:
        return 0
    steps = min(spec.training.max_steps or RECORDED_STEPS, RECORDED_STEPS)
    # One more than is kept: the oldest goes when the newest is there.
    return (steps + 1) * _step_bytes(grpo, spec.data.max_length)


def _step_bytes(grpo: Grpo, max_length: int) -> int:
    over_sampling = 1.0 if grpo.dynamic_sampling is None else grpo.dynamic_sampling.over_sampling
    groups = math.ceil(grpo.prompts_per_step * over_sampling)
    prompt = _ANSWER_BYTES + _ID_BYTES * max(0, max_length - grpo.max_new_tokens)
    answer = _ANSWER_BYTES + _REWARD_BYTES * len(grpo.rewards) + _ID_BYTES * grpo.epochs_per_step
    answer += _TOKEN_BYTES * grpo.max_new_tokens
    return _STEP_BYTES + groups * (prompt + grpo.group_size * answer)


def _adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    return sum(adapter_weights(shape.hidden, layer, lora).total * count for layer, count in layer_kinds(shape))


def _frozen_parameters(shape: ModelShape, spec: Spec) -> int:
    if not has_frozen_router(spec):
        return 0
    further = sum(router_parameters(shape.hidden, layer) for layer in shape.mtp_layers)
    return further + sum(router_parameters(shape.hidden, layer) * count for layer, count in layer_kinds(shape))
