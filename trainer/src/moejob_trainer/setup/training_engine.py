"""The Megatron engine of a run, with the weights it starts from."""

from __future__ import annotations

from moejob_api.derived import has_reference
from moejob_trainer.checkpoints.names import CHECKPOINTS
from moejob_trainer.checkpoints.verification import has_complete_checkpoint
from moejob_trainer.conversion.adapters import build_adapter_table
from moejob_trainer.conversion.loading import open_published_checkpoint
from moejob_trainer.distributed.encoding import BOOLEAN
from moejob_trainer.megatron.stages import build_stages
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.megatron.weights import forget_weights, initialise_adapters, initialise_weights, load_pretrained
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.model import RunModel
from moejob_trainer.training.learning_rate import learning_rate


def build_training_engine(
    context: RankContext, model: RunModel, total_steps: int, *, awaits_checkpoint: bool
) -> MegatronTrainingEngine:
    """Build this rank's stages and load or initialise their weights, except weights that a checkpoint will bring."""
    spec, device = context.spec, context.placement.device
    stages = build_stages(model.architecture, spec, context.layout, context.groups, device)
    if awaits_checkpoint:
        forget_weights(stages)
    elif model.pretrained.has_weights:
        load_pretrained(stages, open_published_checkpoint(model.pretrained.folder, model.table), context.groups)
    else:
        initialise_weights(stages, model.table.parameters, context.groups, spec.training.seed)
    if spec.training.lora is not None:
        declared = build_adapter_table(model.architecture.shape, spec.training.lora).parameters
        initialise_adapters(stages, declared, context.groups, spec.training.seed)
    training = spec.training

    def learning_rate_at(step: int) -> float:
        return learning_rate(step, total_steps, training.optimizer, training.scheduler)

    return MegatronTrainingEngine(model.architecture, spec, stages, context.placement, learning_rate_at)


def needs_checkpoint(context: RankContext, model: RunModel) -> bool:
    """Return whether published weights stay unread, because the run has checkpoints and resumes from one of them.

    Adapters and a reference model need published weights beside a checkpoint.
    """
    spec = context.spec
    if not model.pretrained.has_weights or spec.training.lora is not None or has_reference(spec):
        return False
    return context.on_first_rank(lambda: has_complete_checkpoint(context.environment.folder / CHECKPOINTS), BOOLEAN)
