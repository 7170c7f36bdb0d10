"""The export of a finished run: the whole model, or its adapters, in Hugging Face's format."""

from __future__ import annotations

from functools import partial

import torch

from moejob_api.contract.pods import RunFile
from moejob_trainer.conversion.adapters import AdapterTarget, build_adapter_table, export_adapters
from moejob_trainer.conversion.model_export import ExportTarget, export_weights, skip_check
from moejob_trainer.conversion.text_part import read_other_parts
from moejob_trainer.distributed.encoding import NOTHING
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.megatron.weights import whole_adapters, whole_weights
from moejob_trainer.model.pretrained import name_for_others
from moejob_trainer.model_check.checks import ModelChecks
from moejob_trainer.runtime.disk import explain_failure
from moejob_trainer.runtime.megatron_process import convert_to_megatron
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.model import RunModel


def export_finished_model(
    context: RankContext,
    model: RunModel,
    engine: MegatronTrainingEngine,
    checks: ModelChecks,
    *,
    is_beside_pretrained: bool,
) -> None:
    """Export the trained model, and check that Transformers computes the same from it."""
    folder, pretrained = context.environment.folder / RunFile.EXPORT.value, model.pretrained.folder
    groups, lora = context.placement.model_groups, context.spec.training.lora
    with explain_failure("exporting", folder):
        if lora is None:
            dtype = getattr(torch, context.spec.model.dtype.value)
            target = ExportTarget(
                folder,
                pretrained,
                dtype,
                report_share=context.heartbeat.report_share,
                parts=read_other_parts(pretrained, lambda: pretrained),
            )
            export_weights(whole_weights(engine.stages), model.table, groups, target, checks.check_export)
            if context.spec.checkpoint.export_megatron:
                _export_for_megatron(context)
            return
        adapters, adapter_parameters = (
            whole_adapters(engine.stages),
            build_adapter_table(model.architecture.shape, lora),
        )
        base = name_for_others(context.spec.model, context.environment.folder)
        # The check reads adapters beside published weights; weights that another job has trained are not published.
        check = skip_check
        if model.pretrained.has_weights and is_beside_pretrained:
            check = partial(checks.check_exported_adapters, base=pretrained, scale=lora.alpha / lora.rank)
        export_adapters(adapters, adapter_parameters, groups, AdapterTarget(folder, base, lora), check)


def _export_for_megatron(context: RankContext) -> None:
    folder = context.environment.folder
    context.on_first_rank(
        lambda: convert_to_megatron(folder / RunFile.EXPORT, folder / RunFile.EXPORT_MEGATRON), NOTHING
    )
