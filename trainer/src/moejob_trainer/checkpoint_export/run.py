"""A run folder as `moejob export` reads it: the job, config and tokenizer of its model, and one good checkpoint.

Reads only: the run may be training, have failed, or lie on another machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from moejob_api.contract.pod_environment import read_spec
from moejob_api.contract.pods import RunFile
from moejob_api.derived import trained_shape
from moejob_api.job import Spec
from moejob_api.job.evaluations import comparison_measure
from moejob_api.models.families import shape_of
from moejob_api.models.shape import ModelShape
from moejob_trainer.checkpoints.adapter_compatibility import AdapterFacts
from moejob_trainer.checkpoints.best import find_best_checkpoint
from moejob_trainer.checkpoints.names import CHECKPOINTS
from moejob_trainer.checkpoints.saving import read_adapter_facts
from moejob_trainer.checkpoints.verification import (
    FolderState,
    GoodCheckpoint,
    Refusal,
    VerificationDepth,
    find_latest_checkpoint,
    list_step_folders,
    verify_checkpoint,
)
from moejob_trainer.conversion.templates import CONFIG_FILE
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron.stored_shards import STATE_FORMAT

# Instead of a step: the checkpoint with the best evaluation.
BEST: Final = "best"
Best = Literal["best"]


@dataclass(frozen=True)
class StoredRun:
    """One checkpoint of a run, and what is needed to make a model of it."""

    spec: Spec
    template: Path
    checkpoint: GoodCheckpoint

    @cached_property
    def model_shape(self) -> ModelShape:
        """The model as the job trains it."""
        config = self.template / CONFIG_FILE
        return trained_shape(shape_of(json.loads(config.read_text(encoding="utf-8")), str(config)), self.spec)

    @cached_property
    def adapter_facts(self) -> AdapterFacts:
        """The adapters that the checkpoint holds, if any."""
        return read_adapter_facts(self.checkpoint.path)


def read_stored_run(folder: Path, step: int | Best | None = None) -> StoredRun:
    """Find the checkpoint of a step, the newest good one unless it is named; BadConfiguration where there is none."""
    spec, template = folder / RunFile.SPEC, folder / RunFile.TEMPLATE
    if not spec.is_file() or not (template / CONFIG_FILE).is_file():
        raise BadConfiguration(
            f"{folder} has no {spec.name} or no {template.name}/{CONFIG_FILE}, which a run writes when it has read "
            "its model; name the folder of a run, runs/NAME under moejob run"
        )
    job = read_spec(spec.read_text(encoding="utf-8"))
    checkpoint = (
        _find_best_checkpoint(folder / CHECKPOINTS, job)
        if step == BEST
        else _find_checkpoint(folder / CHECKPOINTS, step)
    )
    state_format = checkpoint.manifest.facts.state_format
    if state_format != STATE_FORMAT:
        raise BadConfiguration(
            f"{checkpoint.path} holds {state_format} and this version reads {STATE_FORMAT}; export it with the version "
            "that wrote it"
        )
    return StoredRun(job, template, checkpoint)


def _find_best_checkpoint(checkpoints: Path, job: Spec) -> GoodCheckpoint:
    search = find_best_checkpoint(checkpoints, comparison_measure(job) or "")
    if search.checkpoint is None:
        reason = "; ".join(map(str, search.refusals)) or "checkpoint.keepBest keeps such, and the job has " + (
            "none yet" if job.checkpoint.keep_best else "no such field"
        )
        raise BadConfiguration(f"{checkpoints} holds no good checkpoint of a best evaluation: {reason}; name a step")
    return search.checkpoint


def _find_checkpoint(checkpoints: Path, step: int | None) -> GoodCheckpoint:
    complete_folders = [listed for listed in list_step_folders(checkpoints) if listed.state is FolderState.COMPLETE]
    if step is None:
        search = find_latest_checkpoint(checkpoints, VerificationDepth.HASHES)
        if search.checkpoint is None:
            raise BadConfiguration(_no_checkpoint_message(checkpoints, search.refusals))
        return search.checkpoint
    folders_of_step = [complete for complete in complete_folders if complete.folder.step == step]
    if not folders_of_step:
        steps = ", ".join(str(complete.folder.step) for complete in reversed(complete_folders)) or "none"
        raise BadConfiguration(f"{checkpoints} holds no complete checkpoint of step {step}; there are: {steps}")
    outcome = verify_checkpoint(checkpoints / folders_of_step[0].folder.name, VerificationDepth.HASHES)
    if isinstance(outcome, Refusal):
        raise BadConfiguration(f"{checkpoints}: {outcome}; name another step")
    return outcome


def _no_checkpoint_message(checkpoints: Path, refusals: tuple[Refusal, ...]) -> str:
    reason = "; ".join(map(str, refusals)) or "nothing was ever completed there"
    return f"{checkpoints} holds no good checkpoint: {reason}; a run saves at checkpoint.everySteps and when it ends"
