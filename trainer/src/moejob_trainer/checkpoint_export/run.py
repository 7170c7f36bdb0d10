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
from moejob_api.job.evaluations import measure
from moejob_api.models.families import shape_of
from moejob_api.models.shape import ModelShape
from moejob_trainer.checkpoints.adapter_compatibility import AdapterFacts
from moejob_trainer.checkpoints.best import best_good
from moejob_trainer.checkpoints.names import CHECKPOINTS
from moejob_trainer.checkpoints.saving import adapter_facts_in
from moejob_trainer.checkpoints.verification import (
    FolderState,
    Found,
    Refusal,
    VerificationDepth,
    checked,
    latest,
    seen,
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
    checkpoint: Found

    @cached_property
    def shape(self) -> ModelShape:
        """The model as the job trains it."""
        config = self.template / CONFIG_FILE
        return trained_shape(shape_of(json.loads(config.read_text(encoding="utf-8")), str(config)), self.spec)

    @cached_property
    def adapters(self) -> AdapterFacts:
        """The adapters that the checkpoint holds, if any."""
        return adapter_facts_in(self.checkpoint.path)


def stored_run(folder: Path, step: int | Best | None = None) -> StoredRun:
    """Find the checkpoint of a step, the newest good one unless it is named; BadConfiguration where there is none."""
    spec, template = folder / RunFile.SPEC, folder / RunFile.TEMPLATE
    if not spec.is_file() or not (template / CONFIG_FILE).is_file():
        raise BadConfiguration(
            f"{folder} has no {spec.name} or no {template.name}/{CONFIG_FILE}, which a run writes when it has read "
            "its model; name the folder of a run, runs/NAME under moejob run"
        )
    job = read_spec(spec.read_text(encoding="utf-8"))
    found = _best(folder / CHECKPOINTS, job) if step == BEST else _checkpoint(folder / CHECKPOINTS, step)
    theirs = found.manifest.facts.state_format
    if theirs != STATE_FORMAT:
        raise BadConfiguration(
            f"{found.path} holds {theirs} and this version reads {STATE_FORMAT}; export it with the version "
            "that wrote it"
        )
    return StoredRun(job, template, found)


def _best(checkpoints: Path, job: Spec) -> Found:
    search = best_good(checkpoints, measure(job) or "")
    if search.found is None:
        why = "; ".join(map(str, search.refused)) or "checkpoint.keepBest keeps such, and the job has " + (
            "none yet" if job.checkpoint.keep_best else "no such field"
        )
        raise BadConfiguration(f"{checkpoints} holds no good checkpoint of a best evaluation: {why}; name a step")
    return search.found


def _checkpoint(checkpoints: Path, step: int | None) -> Found:
    there = [one for one in seen(checkpoints) if one.state is FolderState.COMPLETE]
    if step is None:
        search = latest(checkpoints, VerificationDepth.HASHES)
        if search.found is None:
            raise BadConfiguration(_nothing_good(checkpoints, search.refused))
        return search.found
    named = [one for one in there if one.folder.step == step]
    if not named:
        steps = ", ".join(str(one.folder.step) for one in reversed(there)) or "none"
        raise BadConfiguration(f"{checkpoints} holds no complete checkpoint of step {step}; there are: {steps}")
    outcome = checked(checkpoints / named[0].folder.name, VerificationDepth.HASHES)
    if isinstance(outcome, Refusal):
        raise BadConfiguration(f"{checkpoints}: {outcome}; name another step")
    return outcome


def _nothing_good(checkpoints: Path, refused: tuple[Refusal, ...]) -> str:
    why = "; ".join(map(str, refused)) or "nothing was ever completed there"
    return f"{checkpoints} holds no good checkpoint: {why}; a run saves at checkpoint.everySteps and when it ends"
