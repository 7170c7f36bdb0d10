"""The first job of a user who has none: `moejob plan --auto --model ...` starts from it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moejob_api.job import KIND, MAX_NAME, Method, MoETrainingJob
from moejob_api.job.grpo import BuiltInReward, Grpo, Reward
from moejob_api.job.job import Metadata, Spec
from moejob_api.job.model import Data, DataFormat, Dataset, Model
from moejob_api.job.resources import GpuType, Resources
from moejob_api.job.storage import Storage
from moejob_api.job.training import Training

# A placeholder that the user replaces; its name cannot be taken for real data.
PLACEHOLDER_DATA = "pvc://datasets/train.jsonl"


@dataclass(frozen=True, slots=True)
class StarterOptions:
    """The options of a new job on the command line."""

    model: str
    method: Method
    gpu_type: GpuType | None
    sequence_tokens: int
    global_batch_size: int


def starter_job(options: StarterOptions) -> MoETrainingJob:
    """Return a job that trains the model on placeholder data, on one GPU until a layout is chosen."""
    grpo = Grpo(rewards=(Reward(name=BuiltInReward.MATH),)) if options.method is Method.GRPO else None
    data_format = DataFormat.PROMPTS if options.method is Method.GRPO else DataFormat.CHAT
    return MoETrainingJob(
        api_version="moejob.dev/v1alpha1",
        kind=KIND,
        metadata=Metadata(name=_job_name(options)),
        spec=Spec(
            method=options.method,
            model=Model(source=options.model),
            data=Data(
                train=(Dataset(source=PLACEHOLDER_DATA, format=data_format),), max_length=options.sequence_tokens
            ),
            training=Training(max_steps=1000, global_batch_size=options.global_batch_size),
            grpo=grpo,
            storage=Storage(claim_name="training"),
            resources=Resources(gpu_type=options.gpu_type),
        ),
    )


def _job_name(options: StarterOptions) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", options.model.rpartition("/")[2].lower()).strip("-")
    name = f"{words}-{options.method.lower()}"[:MAX_NAME].strip("-")
    return name if name[:1].isalpha() else f"job-{name}"[:MAX_NAME]
