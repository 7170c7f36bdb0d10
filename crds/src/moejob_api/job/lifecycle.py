"""Start, stop and retries of a job, and the trackers of its numbers."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from moejob_api.job.base import ApiModel, CountOrZero, LongText, ObjectName, Seconds, ShortText


class GangScheduler(StrEnum):
    """The gang scheduler, which starts all pods or none."""

    AUTO = "Auto"
    NATIVE = "Native"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    KUEUE = "Kueue"
    NONE = "None"


# Names that these schedulers have unless resources.schedulerName says another.
GANG_SCHEDULER_NAMES = {GangScheduler.VOLCANO: "volcano", GangScheduler.COSCHEDULING: "scheduler-plugins-scheduler"}


class Lifecycle(ApiModel):
    """Starting, stopping and retrying. All but gang and queue may change while the job lives."""

    suspend: Annotated[bool, Field(description="Stop the pods after a checkpoint and keep the volume.")] = False
    backoff_limit: Annotated[
        CountOrZero, Field(description="Failures that are retried since the last new checkpoint.")
    ] = 6
    ttl_seconds_after_finished: Annotated[
        CountOrZero | None,
        Field(
            description="Seconds after which a finished job is deleted, or (storage.reclaim) its pods. Absent: never."
        ),
    ] = None
    active_deadline_seconds: Annotated[
        Seconds | None, Field(description="Seconds the job may run, suspended time not counted. Absent: for ever.")
    ] = None
    progress_deadline_seconds: Annotated[
        Seconds, Field(description="A run whose ranks are silent for this many seconds is hung and restarted.")
    ] = 1800
    gang: Annotated[
        GangScheduler,
        Field(
            description=(
                "Gang scheduler. Auto: with a queue Kueue, or Volcano where there is only that; without one Native "
                "where the cluster has it, else None."
            )
        ),
    ] = GangScheduler.AUTO
    queue: Annotated[ObjectName | None, Field(description="Queue of Kueue or Volcano.")] = None


class Wandb(ApiModel):
    """Weights & Biases; the API key comes from the environment."""

    project: Annotated[ShortText, Field(description="Project name.")]
    entity: Annotated[ShortText | None, Field(description="Team or user. Absent: the key's default.")] = None
    group: Annotated[ShortText | None, Field(description="Group of runs.")] = None


class MLflow(ApiModel):
    """MLflow; credentials come from the environment."""

    tracking_uri: Annotated[LongText, Field(description="Address of the tracking server.")]
    experiment: Annotated[ShortText, Field(description="Experiment name.")] = "moejob"


class Trackio(ApiModel):
    """The inbox of trackio in the run folder."""

    project: Annotated[ShortText, Field(description="Project name.")] = "moejob"


class Tracking(ApiModel):
    """The trackers of the run's numbers; one that fails never stops a run."""

    tensorboard: Annotated[bool, Field(description="Write TensorBoard events to the run folder.")] = True
    wandb: Annotated[Wandb | None, Field(description="Send to Weights & Biases.")] = None
    mlflow: Annotated[MLflow | None, Field(description="Send to MLflow.")] = None
    trackio: Annotated[Trackio | None, Field(description="Write trackio's inbox to the run folder.")] = None
