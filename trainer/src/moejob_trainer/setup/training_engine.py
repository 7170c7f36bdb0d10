"""The Megatron engine of a run, with the weights it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moejob_api.contract.pods import RunPhase
from moejob_api.derived import has_reference, uses_megatron_models
from moejob_api.job.job import Spec
from moejob_api.layout.sizes import Layout
from moejob_trainer.checkpoints.names import CHECKPOINTS
from moejob_trainer.checkpoints.verification import has_complete_checkpoint
from moejob_trainer.conversion.adapters import build_adapter_table
from moejob_trainer.conversion.loading import open_published_checkpoint
from moejob_trainer.distributed.encoding import BOOLEAN
from moejob_trainer.megatron.stages import build_stages
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine, TrainingPlacement
from moejob_trainer.megatron.weights import forget_weights, initialise_adapters, initialise_weights, load_pretrained
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.stage import ModelStage
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.model import RunModel
from moejob_trainer.training.learning_rate import learning_rate


def build_training_engine(
    context: RankContext, model: RunModel, total_steps: int, *, awaits_checkpoint: bool
) -> MegatronTrainingEngine:
    """Build this rank's stages and load or initialise their weights, except weights that a checkpoint will bring."""
    spec = context.spec
    stages = build_model_stages(model.pretrained.config, model.architecture, spec, context.layout, context.placement)
    if awaits_checkpoint:
        forget_weights(stages)
    elif model.pretrained.has_weights:
        context.heartbeat.enter_phase(RunPhase.RESTORING)
        published = open_published_checkpoint(model.pretrained.folder, model.table)
        load_pretrained(stages, published, context.groups, context.heartbeat.report_share)
    else:
        initialise_weights(stages, model.table.parameters, context.groups, spec.training.seed)
    if spec.training.lora is not None:
        declared = build_adapter_table(model.architecture.shape, spec.training.lora).parameters
        initialise_adapters(stages, declared, context.groups, spec.training.seed)
    training = spec.training

    def learning_rate_at(step: int) -> float:
        return learning_rate(step, total_steps, training.optimizer, training.scheduler)

    return MegatronTrainingEngine(model.architecture, spec, stages, context.placement, learning_rate_at)


def build_model_stages(
    config: Mapping[str, Any], model: Architecture, spec: Spec, layout: Layout, placement: TrainingPlacement
) -> list[ModelStage]:
    """Build this rank's stages of the implementation that the job names; weights are undefined."""
    if not uses_megatron_models(spec):
        return [*build_stages(model, spec, layout, placement.groups, placement.device)]
    # Imported here: Bridge takes 6 s of a core and 80 MB, and native layers need none of it.
    from moejob_trainer.megatron_models.build import build_megatron_stages  # noqa: PLC0415

    return build_megatron_stages(config, model, spec, layout, placement)


def needs_checkpoint(context: RankContext, model: RunModel) -> bool:
    """Return whether published weights stay unread, because the run has checkpoints and resumes from one of them.

    Adapters and a reference model need published weights beside a checkpoint.
    """
    spec = context.spec
    if not model.pretrained.has_weights or spec.training.lora is not None or has_reference(spec):
        return False
    return context.on_first_rank(lambda: has_complete_checkpoint(context.environment.folder / CHECKPOINTS), BOOLEAN)
