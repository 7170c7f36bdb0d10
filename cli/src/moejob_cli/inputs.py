"""The input of a command from files: the job, and its model's shape when it can be seen from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moejob_api.documents import read_file
from moejob_api.job import MoETrainingJob
from moejob_api.job.status import AppliedProfile
from moejob_api.models.shape import ModelShape
from moejob_api.models.sources import UnseenModel, model_shape
from moejob_api.planner.plan import Plan, plan_job
from moejob_cli.sweeps import read_sweep


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job and its plan; `unseen` says why the model could not be checked, `profile` what the job has from one."""

    job: MoETrainingJob
    plan: Plan
    unseen: str | None
    profile: AppliedProfile | None = None


def plan_file(file: str, settings: Sequence[str] = (), available_gpus: int | None = None) -> PlannedJob:
    """Return the plan of the job in a file, changed by --set."""
    return plan_read_job(read_file(file, settings), available_gpus)


def plan_swept_jobs(file: str, settings: Sequence[str]) -> tuple[PlannedJob, ...]:
    """Return the plan of each job of a sweep."""
    return tuple(plan_read_job(job) for job in read_sweep(file, settings))


def plan_read_job(
    job: MoETrainingJob, available_gpus: int | None = None, profile: AppliedProfile | None = None
) -> PlannedJob:
    """Return the plan of a job that may have been merged with a profile."""
    shape = job_model_shape(job)
    if isinstance(shape, UnseenModel):
        return PlannedJob(job, plan_job(job.spec, None, available_gpus), shape.reason, profile)
    return PlannedJob(job, plan_job(job.spec, shape, available_gpus), None, profile)


def job_model_shape(job: MoETrainingJob) -> ModelShape | UnseenModel:
    """Return the shape of a job's model, or the reason that it cannot be read from here."""
    return model_shape(job.spec.model.config_source, job.spec.model.revision)
