"""What operator, trainer and `moejob run` agree on: names, ports, paths, exit codes and the JSON that pods speak.

The operator passes a trainer pod nothing but this environment; the launcher in the pod knows the rest.
"""

from __future__ import annotations

import re
from enum import IntEnum, StrEnum
from typing import Annotated

from pydantic import Field

from moejob_api.job.base import ApiModel


class Label(StrEnum):
    """Labels on everything the operator creates."""

    JOB = "moejob.dev/job"
    JOB_UID = "moejob.dev/job-uid"
    ROLE = "moejob.dev/role"
    ATTEMPT = "moejob.dev/attempt"
    INDEX = "moejob.dev/index"
    MANAGED_BY = "app.kubernetes.io/managed-by"


MANAGED_BY = "moejob"


class Role(StrEnum):
    """What a pod is for. Trainers form the gang; rollout engines come and go."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


class Environment(StrEnum):
    """Variables that the operator (or `moejob run`) sets for the launcher; a job may set none starting with MOEJOB_."""

    JOB = "MOEJOB_JOB"
    NAMESPACE = "MOEJOB_NAMESPACE"
    UID = "MOEJOB_UID"
    # The spec as JSON, all defaults filled in.
    SPEC = "MOEJOB_SPEC"
    ROLE = "MOEJOB_ROLE"
    ATTEMPT = "MOEJOB_ATTEMPT"
    INDEX = "MOEJOB_INDEX"
    NODES = "MOEJOB_NODES"
    RANKS_PER_NODE = "MOEJOB_RANKS_PER_NODE"
    # Host name of pod 0, where the store of the rendezvous listens.
    RENDEZVOUS_HOST = "MOEJOB_RENDEZVOUS_HOST"
    # Own host name as the others can resolve it.
    HOST = "MOEJOB_HOST"
    RUN_FOLDER = "MOEJOB_RUN_FOLDER"
    GRACE_SECONDS = "MOEJOB_GRACE_SECONDS"
    PROGRESS_PORT = "MOEJOB_PROGRESS_PORT"
    RENDEZVOUS_PORT = "MOEJOB_RENDEZVOUS_PORT"
    # Addresses of separate engines, comma separated.
    ROLLOUT_URLS = "MOEJOB_ROLLOUT_URLS"


class Port(IntEnum):
    """Ports inside a pod."""

    PROGRESS = 9400
    RENDEZVOUS = 29400
    # Process groups of the ranks; torch picks further free ones by itself.
    RANKS = 29500
    ROLLOUT = 8000
    WEIGHTS = 29600


class Path(StrEnum):
    """Paths inside a pod that are not for the job to choose."""

    SHARED_MEMORY = "/dev/shm"
    TERMINATION = "/dev/termination-log"
    TEMPORARY = "/tmp"
    CLAIMS = "/claims"


class RunFile(StrEnum):
    """What a run leaves in its folder."""

    OWNER = "run.json"
    CLAIMS = "claims"
    STEPS = "steps.jsonl"
    CHECKPOINTS = "checkpoints"
    EXPORT = "export"
    LOGS = "logs"


class HttpPath(StrEnum):
    """What a pod serves on the progress port."""

    PROGRESS = "/progress"
    METRICS = "/metrics"
    # Answers 200 once every rank of the pod has sent a heartbeat.
    READY = "/ready"


class ExitCode(IntEnum):
    """How a launcher ends. Every other code is a failure that counts."""

    DONE = 0
    # The job or its data cannot work: retrying would fail the same way.
    BAD_CONFIGURATION = 78
    # Asked to stop and stopped after saving: not counted.
    SAVED_AND_STOPPED = 143


# Kubernetes keeps this many bytes of a termination message.
TERMINATION_BYTES = 4096

RunStep = Annotated[int, Field(ge=0)]


class RankBeat(ApiModel):
    """The last sign of life of one rank."""

    rank: Annotated[int, Field(ge=0, description="Global rank.")]
    pid: Annotated[int, Field(ge=0, description="Process id inside the pod.")]
    step: Annotated[RunStep, Field(description="Steps this rank has done.")]
    age_seconds: Annotated[float, Field(ge=0.0, description="Seconds since the beat, by the pod's own clock.")]


class RunProgress(ApiModel):
    """The run as rank 0 sees it; served by pod 0 only."""

    step: Annotated[RunStep, Field(description="Steps done.")]
    total_steps: Annotated[int | None, Field(ge=1, description="Steps of the whole run.")] = None
    epoch: Annotated[float | None, Field(ge=0.0, description="Passes over the data done.")] = None
    loss: Annotated[float | None, Field(description="Loss of the last step.")] = None
    mtp_loss: Annotated[float | None, Field(description="Loss of further tokens.")] = None
    reward: Annotated[float | None, Field(description="Mean reward of the last step.")] = None
    learning_rate: Annotated[float | None, Field(ge=0.0, description="Rate of the last update.")] = None
    gradient_norm: Annotated[float | None, Field(ge=0.0, description="Norm before clipping.")] = None
    tokens_per_second_per_gpu: Annotated[float | None, Field(ge=0.0, description="Speed.")] = None
    mfu: Annotated[float | None, Field(ge=0.0, description="Share of peak.")] = None
    last_checkpoint_step: Annotated[int | None, Field(ge=0, description="Newest complete checkpoint.")] = None
    save_seconds: Annotated[float | None, Field(ge=0.0, description="How long the last save took.")] = None
    stepping_seconds: Annotated[
        float | None,
        Field(ge=0.0, description="From the beginning of the first step of these ranks to the end of this one."),
    ] = None


class Outcome(StrEnum):
    """How a pod ended, in its own words."""

    COMPLETED = "Completed"
    PREEMPTED = "Preempted"
    BAD_CONFIGURATION = "BadConfiguration"
    RANK_FAILED = "RankFailed"
    HUNG = "Hung"
    LOST_PEERS = "LostPeers"


class RankFault(ApiModel):
    """Why a launcher has restarted its ranks in place."""

    outcome: Annotated[Outcome, Field(description="RankFailed or Hung.")]
    message: Annotated[str, Field(max_length=512, description="One sentence, with the last log line.")] = ""
    rank: Annotated[int | None, Field(ge=0, description="Global rank to blame.")] = None
    exit_code: Annotated[int | None, Field(description="Exit code of that rank; a negative one is a signal.")] = None


class PodProgress(ApiModel):
    """The body of GET /progress."""

    attempt: Annotated[int, Field(ge=0, description="Attempt the pod belongs to.")]
    index: Annotated[int, Field(ge=0, description="Index of the pod.")]
    restarts: Annotated[int, Field(ge=0, description="Restarts of ranks inside this pod.")] = 0
    fault: Annotated[RankFault | None, Field(description="What the last of these restarts was for.")] = None
    ready: Annotated[bool, Field(description="Every rank of the pod has sent a heartbeat.")] = False
    ranks: Annotated[tuple[RankBeat, ...], Field(description="One entry for each living rank.")] = ()
    run: Annotated[RunProgress | None, Field(description="The run; from pod 0 only.")] = None


class LastWord(ApiModel):
    """The JSON a launcher leaves in the termination message."""

    outcome: Annotated[Outcome, Field(description="How it ended.")]
    message: Annotated[str, Field(max_length=2048, description="One sentence, or the last log line.")] = ""
    rank: Annotated[int | None, Field(ge=0, description="Global rank to blame.")] = None
    exit_code: Annotated[int | None, Field(description="Exit code of that rank.")] = None
    step: Annotated[int | None, Field(ge=0, description="Steps done.")] = None
    run: Annotated[RunProgress | None, Field(description="The run as it was left; from pod 0 only.")] = None
    restarts: Annotated[int, Field(ge=0, description="Restarts of ranks inside this pod.")] = 0
    fault: Annotated[RankFault | None, Field(description="What the last of these restarts was for.")] = None


class RunOwner(ApiModel):
    """The job that a run folder belongs to, as its owner file says."""

    job: Annotated[str, Field(min_length=1, description="Name of the job.")]
    uid: Annotated[str, Field(min_length=1, description="UID of the job: another of the same name is another job.")]


_CLAIM = re.compile(r"(\d{10})\.(\d{10})")


def claim_name(attempt: int, restart: int) -> str:
    """The file by which one start of all ranks claims a run folder. Zero-padded, so that names order as numbers do."""
    return f"{attempt:010d}.{restart:010d}"


def claimed(name: str) -> tuple[int, int] | None:
    """Attempt and restart of a claim's file name; None when it is something else's."""
    found = _CLAIM.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


def pod_name(job: str, role: Role, attempt: int, index: int) -> str:
    """The name of a pod. Zero-padded: launchers are ordered by address as text, and 10 must come after 9."""
    return f"{job}-{role}-{attempt}-{index:05d}"
