"""Checkpoints and the volume they live on."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from moejob_api.job.base import AbsolutePath, ApiModel, Count, LongText, ObjectName, Positive, Quantity


class ResumeMode(StrEnum):
    """The parts that are taken of another job's checkpoint."""

    WEIGHTS = "Weights"
    RUN = "Run"


class Checkpoint(ApiModel):
    """Saving of the run, and retention."""

    every_steps: Annotated[
        Count | None,
        Field(description="Steps between checkpoints. At most one of everySteps and everyMinutes is given."),
    ] = None
    every_minutes: Annotated[
        Positive | None, Field(description="Minutes between checkpoints. Absent, with everySteps absent: 30.")
    ] = None
    keep: Annotated[
        int, Field(ge=1, le=10_000, description="Complete checkpoints that are kept, the newest first.")
    ] = 2
    keep_best: Annotated[
        int | None,
        Field(
            ge=1,
            le=10_000,
            description="Checkpoints of the best evaluations (training.bestBy) that are saved and kept beside the "
            "newest; the best is what the run exports. Absent: none.",
        ),
    ] = None
    asynchronous: Annotated[
        bool, Field(alias="async", description="Write in the background while training continues.")
    ] = True
    export_hugging_face: Annotated[
        bool, Field(description="At the end, export safetensors and verify them by loading them again.")
    ] = True
    export_megatron: Annotated[
        bool,
        Field(
            description="At the end, write the exported model as a torch_dist checkpoint of Megatron too, with "
            "config.json and tokenizer, and verify it by reading it again. For a whole model, without MTP modules."
        ),
    ] = False
    resume_from: Annotated[
        LongText | None,
        Field(
            description="Start from the checkpoint of another job: its name, when it shares the claim, "
            "or pvc://claim/path. The job's own checkpoints win once there are any."
        ),
    ] = None
    resume: Annotated[
        ResumeMode,
        Field(
            description="What resumeFrom takes. Weights: a new run begins with them. Run: the other job's run goes on, "
            "with its optimizer, its step and its place in the data, in this job's layout."
        ),
    ] = ResumeMode.WEIGHTS


class AccessMode(StrEnum):
    """The access mode of the volume."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_MANY = "ReadWriteMany"


class Reclaim(StrEnum):
    """The fate of the new claim when the time of a finished job is over."""

    RETAIN = "Retain"
    DELETE = "Delete"


class Storage(ApiModel):
    """The volume for checkpoints, exports and downloads; exactly one of claimName and size is given."""

    claim_name: Annotated[
        ObjectName | None, Field(description="An existing PersistentVolumeClaim. It outlives the job.")
    ] = None
    size: Annotated[
        Quantity | None, Field(description="Size of a new claim, such as 2Ti; it is deleted with the job.")
    ] = None
    storage_class: Annotated[
        ObjectName | None, Field(description="Storage class of the new claim. Absent: the cluster's default.")
    ] = None
    access_modes: Annotated[
        tuple[AccessMode, ...],
        Field(
            min_length=1, max_length=2, description="Access modes of the new claim; several nodes need ReadWriteMany."
        ),
    ] = (AccessMode.READ_WRITE_MANY,)
    reclaim: Annotated[
        Reclaim,
        Field(
            description="The end of lifecycle.ttlSecondsAfterFinished for a job with a new claim. Retain: its pods are "
            "deleted, job and claim stay. Delete: the job is deleted, and the claim with it."
        ),
    ] = Reclaim.RETAIN
    mount_path: Annotated[AbsolutePath, Field(description="Where every pod sees the volume.")] = "/moejob"
