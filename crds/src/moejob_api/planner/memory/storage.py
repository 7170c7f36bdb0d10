"""Bytes on the volume: one checkpoint, one export, the model as it was downloaded."""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.derived import router_is_frozen, trained_shape
from moejob_api.job import Spec
from moejob_api.job.base import Dtype
from moejob_api.job.training import Lora
from moejob_api.models.parameters import layer_kinds, mtp_parameters, parameters
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.adapters import adapter_weights
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES
from moejob_api.planner.memory.kinds import router_parameters


@dataclass(frozen=True, slots=True)
class VolumeNeed:
    """Bytes that a run writes to its volume at the most; `checkpoint` is the size of one."""

    checkpoint: int
    checkpoints: int
    export: int
    download: int

    @property
    def bytes(self) -> int:
        """All of it together."""
        return self.checkpoint * self.checkpoints + self.export + self.download


def volume_need(shape: ModelShape, spec: Spec) -> VolumeNeed:
    """The need of a run; one checkpoint more than are kept, for the oldest goes only when the newest is complete."""
    return VolumeNeed(
        checkpoint=checkpoint_bytes(shape, spec),
        checkpoints=spec.checkpoint.keep + (spec.checkpoint.keep_best or 0) + 1,
        export=export_bytes(shape, spec) if spec.checkpoint.export_hugging_face else 0,
        download=download_bytes(shape, spec),
    )


def checkpoint_bytes(shape: ModelShape, spec: Spec) -> int:
    """One checkpoint: the weights, and for each trained parameter its float32 copy and two moments.

    Under adapters, weights are held only where another job may have trained them.
    """
    lora = spec.training.lora
    shape = trained_shape(shape, spec)
    whole = parameters(shape) + mtp_parameters(shape)
    adapters = 0 if lora is None else _adapters(shape, lora)
    trained = whole - _frozen(shape, spec) if lora is None else adapters
    master = 0 if spec.model.dtype is Dtype.FLOAT32 else FLOAT32_BYTES
    state = master + 2 * spec.training.precision.moments.size_bytes
    held = adapters if lora is not None and spec.checkpoint.resume_from is None else whole + adapters
    return held * spec.model.dtype.size_bytes + trained * state


def export_bytes(shape: ModelShape, spec: Spec) -> int:
    """The exported model; adapters are merged into it."""
    shape = trained_shape(shape, spec)
    return (parameters(shape) + mtp_parameters(shape)) * spec.model.dtype.size_bytes


def download_bytes(shape: ModelShape, spec: Spec) -> int:
    """Files of a model that comes from the hub, whose weights are bfloat16 as a rule; 0 for a folder."""
    if spec.model.is_folder:
        return 0
    return (parameters(shape) + mtp_parameters(shape)) * Dtype.BFLOAT16.size_bytes


def _adapters(shape: ModelShape, lora: Lora) -> int:
    return sum(adapter_weights(shape.hidden, layer, lora).total * count for layer, count in layer_kinds(shape))


def _frozen(shape: ModelShape, spec: Spec) -> int:
    if not router_is_frozen(spec):
        return 0
    further = sum(router_parameters(shape.hidden, layer) for layer in shape.mtp_layers)
    return further + sum(router_parameters(shape.hidden, layer) * count for layer, count in layer_kinds(shape))
