"""The model of a run: its architecture, its pretrained files, and the table between their names and ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moejob_api.contract.pod_environment import spec_text
from moejob_api.contract.pods import RunFile
from moejob_api.derived import trained_shape
from moejob_api.job import Method
from moejob_api.job.storage import ResumeMode
from moejob_api.models.families import shape_of
from moejob_api.models.shape import ModelShape
from moejob_api.planner.plan import plan_job
from moejob_api.problems import InvalidSpec
from moejob_trainer.checkpoints.run import folder_of_run, resume_folder
from moejob_trainer.conversion.families import TensorTable, build_tensor_table
from moejob_trainer.data.hub import HubPins
from moejob_trainer.distributed.encoding import NOTHING, TEXT
from moejob_trainer.model.architecture import Architecture, read_architecture, trained_architecture
from moejob_trainer.model.pretrained import PretrainedModel, fetch_model, read_pretrained
from moejob_trainer.rollouts.engine_model import lay_out_model
from moejob_trainer.runtime.disk import Disk, replace_file
from moejob_trainer.runtime.environment import RankEnvironment
from moejob_trainer.runtime.heartbeats import ShareReport
from moejob_trainer.runtime.megatron_process import require_convertible
from moejob_trainer.setup.context import RankContext


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model of the run: its architecture, its pretrained files, and the table of their names."""

    architecture: Architecture
    pretrained: PretrainedModel
    table: TensorTable


def load_model(context: RankContext) -> RunModel:
    """Fetch the model's files once for all ranks, and check that the job can train it."""
    spec = context.spec
    # The first rank downloads and writes files, for all ranks share the volume.
    folder = context.on_first_rank(lambda: str(_fetch_model(context.environment, context.heartbeat.report_share)), TEXT)
    pretrained = read_pretrained(Path(folder), spec.model)
    origin = f"{folder}/config.json"
    # The plan was checked before the start, unless the model could not be read there. Check it first: all that is
    # built below relies on it.
    if problems := plan_job(spec, trained_shape(shape_of(pretrained.config, origin), spec)).problems:
        raise InvalidSpec(problems)
    model = trained_architecture(read_architecture(pretrained.config, origin), spec)
    if spec.checkpoint.export_megatron:
        # Days of training would end in an export that was never possible.
        context.on_first_rank(lambda: require_convertible(Path(folder)), NOTHING)
    context.on_first_rank(lambda: _write_export_inputs(context.environment, Path(folder), model.shape), NOTHING)
    if spec.method is Method.GRPO:
        context.on_first_rank(lambda: _lay_out_for_engines(context.environment, Path(folder), model.shape), TEXT)
    return RunModel(model, pretrained, build_tensor_table(model.shape))


def _fetch_model(environment: RankEnvironment, report_share: ShareReport) -> Path:
    spec, folder = environment.spec, environment.folder
    if spec.checkpoint.resume_from is not None and spec.checkpoint.resume is ResumeMode.RUN:
        # The place in the data and the base of adapters belong to the Hub commits that the other run has used.
        HubPins(folder).inherit_pins(folder_of_run(resume_folder(spec.checkpoint.resume_from, folder)))
    return fetch_model(spec.model, folder, report_share=report_share)


def _write_export_inputs(environment: RankEnvironment, pretrained: Path, shape: ModelShape) -> None:
    """Leave in the run folder what `moejob export` needs beside a checkpoint."""
    folder, spec = environment.folder, environment.spec
    replace_file(Disk(), folder / RunFile.SPEC, spec_text(spec).encode())
    lay_out_model(pretrained, folder / RunFile.TEMPLATE, shape, getattr(torch, spec.model.dtype.value))


def _lay_out_for_engines(environment: RankEnvironment, pretrained: Path, shape: ModelShape) -> str:
    folder = environment.folder / RunFile.ENGINE_MODEL
    lay_out_model(pretrained, folder, shape, getattr(torch, environment.spec.model.dtype.value))
    return str(folder)
