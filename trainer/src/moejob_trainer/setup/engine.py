"""The Megatron engine of a run, with the weights it starts from."""

from __future__ import annotations

from moejob_api.derived import updates_per_step
from moejob_trainer.conversion.adapters import adapter_table
from moejob_trainer.conversion.loading import opened
from moejob_trainer.engine.learning_rate import learning_rate
from moejob_trainer.megatron.engine import MegatronEngine
from moejob_trainer.megatron.stages import built
from moejob_trainer.megatron.weights import initialise, load_pretrained, start_adapters
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.model import RunModel


def build_engine(context: RankContext, model: RunModel, total_steps: int) -> MegatronEngine:
    """Build this rank's stages and load or initialise their weights."""
    spec, device = context.spec, context.placement.device
    stages = built(model.architecture, spec, context.layout, context.groups, device)
    if model.pretrained.has_weights:
        load_pretrained(stages, opened(model.pretrained.folder, model.table), context.groups)
    else:
        initialise(stages, model.table.parameters, context.groups, spec.training.seed)
    if spec.training.lora is not None:
        declared = adapter_table(model.architecture.shape, spec.training.lora).parameters
        start_adapters(stages, declared, context.groups, spec.training.seed)
    training, of_step = spec.training, updates_per_step(spec)

    def rate(update: int) -> float:
        # Warm-up and decay are counted in steps, of which each may be several updates.
        return learning_rate(update // of_step, total_steps, training.optimizer, training.scheduler)

    return MegatronEngine(model.architecture, spec, stages, context.placement, rate)
