"""The contract of operator, trainer and `moejob run`: names, ports, paths, exit codes and the JSON that pods speak.

The operator passes a trainer pod nothing but this environment; the launcher in the pod knows the rest.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from moejob_api.contract.names import Label as Label  # noqa: PLC0414 names without models have a module of their own
from moejob_api.contract.names import PodPath as PodPath  # noqa: PLC0414
from moejob_api.contract.names import PodRole as PodRole  # noqa: PLC0414
from moejob_api.contract.names import RunFile as RunFile  # noqa: PLC0414
from moejob_api.contract.texts import escaped_lines as escaped_lines  # noqa: PLC0414
from moejob_api.contract.texts import escaped_text as escaped_text  # noqa: PLC0414
from moejob_api.contract.texts import printable_text as printable_text  # noqa: PLC0414
from moejob_api.job.base import MAX_COUNT, MOST_RANKS_OF_A_POD, ApiModel
from moejob_api.job.status import MOST_HUB_COMMITS, HubCommit


class TrainingLabel(StrEnum):
    """Labels of Kubeflow's training-operator, by which tools for PyTorchJob find pods."""

    JOB_NAME = "training.kubeflow.org/job-name"
    REPLICA_TYPE = "training.kubeflow.org/replica-type"
    REPLICA_INDEX = "training.kubeflow.org/replica-index"
    JOB_ROLE = "training.kubeflow.org/job-role"
    # Services of a PyTorchJob of the same name select by it, and must not select these pods.
    OPERATOR_NAME = "training.kubeflow.org/operator-name"


MANAGED_BY = "moejob"


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
    # Host names of further trainer pods, comma separated, whose index is beyond the nodes. Absent: none.
    SPARE_HOSTS = "MOEJOB_SPARE_HOSTS"
    RANKS_PER_NODE = "MOEJOB_RANKS_PER_NODE"
    # Host name of pod 0, where the store of the rendezvous listens first; a spare may host the next one.
    RENDEZVOUS_HOST = "MOEJOB_RENDEZVOUS_HOST"
    # Own host name as the others can resolve it.
    HOST = "MOEJOB_HOST"
    # Name of the node, for the record of the run. Absent on a machine that is no node of a cluster.
    NODE = "MOEJOB_NODE"
    RUN_FOLDER = "MOEJOB_RUN_FOLDER"
    GRACE_SECONDS = "MOEJOB_GRACE_SECONDS"
    PROGRESS_PORT = "MOEJOB_PROGRESS_PORT"
    RENDEZVOUS_PORT = "MOEJOB_RENDEZVOUS_PORT"
    # Addresses of all engines, comma separated; an engine's own INDEX is its place among them.
    ROLLOUT_URLS = "MOEJOB_ROLLOUT_URLS"
    # Python of the rollout environment, which the launcher starts colocated engines with.
    ROLLOUT_PYTHON = "MOEJOB_ROLLOUT_PYTHON"
    # Only the processes of the job know it: they ask one another for it, and prove claims on the run folder by it.
    SECRET = "MOEJOB_SECRET"


def engine_key(secret: str) -> str:
    """Return the key that engines of a job ask for, derived from its secret.

    Every request carries the key, to any pod that has the engine's address by then. A reader of this key can neither
    join the rendezvous nor claim the run folder.
    """
    return hmac.digest(secret.encode(), b"moejob engines", hashlib.sha256).hex()


def weights_key(secret: str) -> bytes:
    """Return the key that rank 0 and the engines' workers prove to each other before weights travel.

    Unlike the key of engines, no process ever sends it.
    """
    return hmac.digest(secret.encode(), b"moejob weights", hashlib.sha256)


class PodPort(IntEnum):
    """Ports inside a pod."""

    PROGRESS = 9400
    RENDEZVOUS = 29400
    # MASTER_PORT: nothing of moejob listens there, so that a script or library may.
    RANKS = 29500
    ROLLOUT = 8000


class HttpPath(StrEnum):
    """The paths that a pod serves on the progress port, and an engine on its own."""

    PROGRESS = "/progress"
    METRICS = "/metrics"
    # Answers 200 once every rank of the pod has sent a heartbeat, or an engine has generated a token.
    READY = "/ready"
    # Served by an engine: requests and replies of moejob_api.contract.answers.
    ANSWER = "/answer"
    # Served by an engine: the report of contract/publications.py, between a publication's last tensor and its end.
    PUBLICATION = "/publication"


class ExitCode(IntEnum):
    """The exit codes of a launcher. Every other code is a failure that counts."""

    DONE = 0
    # The job or its data cannot work: retrying would fail the same way.
    BAD_CONFIGURATION = 78
    # Asked to stop and stopped after saving: not counted.
    SAVED_AND_STOPPED = 143


# Kubernetes keeps this many bytes of a termination message.
TERMINATION_BYTES = 4096


# Bounds on a pod's message: its reader refuses a value beyond them, before any code calculates with it.
PrintableText = Annotated[str, AfterValidator(printable_text)]
RunStep = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Number = Annotated[int, Field(ge=0, le=MAX_COUNT)]
ExitStatus = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
Duration = Annotated[float, Field(ge=0.0, le=1e9)]
# All of float32 and bfloat16: a run that diverges still reports.
Measure = Annotated[float, Field(ge=-1e39, le=1e39)]
NonNegativeMeasure = Annotated[float, Field(ge=0.0, le=1e39)]
# Numbers of a step that have no field of their own. A reward's name may be an address.
MOST_MEASURES, MOST_MEASURE_NAME = 256, 512
MeasureName = Annotated[PrintableText, Field(max_length=MOST_MEASURE_NAME)]


class StatusMeasure(StrEnum):
    """The measures of a run that its status needs. An operator of another version ignores measures it does not know."""

    EVAL_LOSS = "evalLoss"
    EVAL_SCORE = "evalScore"
    BEST_STEP = "bestStep"
    BEST_SCORE = "bestScore"
    STOPPED_EARLY = "stoppedEarly"


class RunPhase(StrEnum):
    """The phases of a start of all ranks and of its end, in their order."""

    IMPORTING = "importing"
    AWAITING_PODS = "waiting for all pods"
    JOINING = "joining the ranks"
    READING_MODEL = "reading the model's files"
    PREPARING_DATA = "preparing the data"
    BUILDING = "building the model"
    RESTORING = "loading and checking weights"
    CHECKING = "checking the model"
    AWAITING_ENGINES = "waiting for engines"
    FIRST_STEP = "in the first step"
    STEPPING = "stepping"
    FINISHING = "finishing the last save"
    EXPORTING = "exporting and checking the export"
    # Of a pod without a place in the gang. The last one: it holds up no rank.
    SPARE = "waiting as a spare"


# The share of a phase stands in its text, and so do the ends of engines: an operator of another version refuses a
# report with a field that it does not know.
_PHASE_TEXT = re.compile(
    r"([a-z' ]+)(?:: ([0-9]{1,3}) %|: (engine [0-9]{1,7} has ended (?:once|[0-9]{1,7} times)))?", re.ASCII
)


def phase_text(phase: RunPhase, share: float | None = None) -> str:
    """Return a phase as it is reported, such as `loading and checking weights: 43 %`."""
    # Rounded down: 100 % is reached at the end.
    return phase.value if share is None else f"{phase}: {int(100 * min(1.0, max(0.0, share)))} %"


def engine_ends_text(ends: Mapping[int, int]) -> str:
    """Return the engine that has ended most often, and how often; empty where none has ended."""
    engine = max(ends, key=lambda index: ends[index], default=None)
    if engine is None or not ends[engine]:
        return ""
    return f"engine {engine} has ended {'once' if ends[engine] == 1 else f'{ends[engine]} times'}"


def parse_engine_ends(text: str) -> str:
    """Return what a phase says of the ends of engines; empty where it says nothing."""
    match = _PHASE_TEXT.fullmatch(text)
    return "" if match is None or match[3] is None else match[3]


def parse_phase(text: str) -> tuple[RunPhase, int | None] | None:
    """Return the phase of a text, with its percentage; None for a text that is no phase."""
    match = _PHASE_TEXT.fullmatch(text)
    if match is None or match[1] not in list(RunPhase):
        return None
    percentage = None if match[2] is None else int(match[2])
    return None if percentage is not None and percentage > 100 else (RunPhase(match[1]), percentage)


class ReportedHeartbeat(ApiModel):
    """The last sign of life of one rank."""

    rank: Annotated[Number, Field(description="Global rank.")]
    pid: Annotated[Number, Field(description="Process id inside the pod.")]
    step: Annotated[RunStep, Field(description="Steps this rank has done.")]
    age_seconds: Annotated[Duration, Field(description="Seconds since the beat, by the pod's own clock.")]


class RunProgress(ApiModel):
    """The run as rank 0 sees it; served by the pod of rank 0 only."""

    step: Annotated[RunStep, Field(description="Steps done.")]
    total_steps: Annotated[Number | None, Field(ge=1, description="Steps of the whole run.")] = None
    epoch: Annotated[NonNegativeMeasure | None, Field(description="Passes over the data done.")] = None
    loss: Annotated[Measure | None, Field(description="Loss of the last step.")] = None
    mtp_loss: Annotated[Measure | None, Field(description="Loss of further tokens.")] = None
    reward: Annotated[Measure | None, Field(description="Mean reward of the last step.")] = None
    learning_rate: Annotated[NonNegativeMeasure | None, Field(description="Rate of the last update.")] = None
    gradient_norm: Annotated[NonNegativeMeasure | None, Field(description="Norm before clipping.")] = None
    tokens_per_second_per_gpu: Annotated[NonNegativeMeasure | None, Field(description="Speed.")] = None
    mfu: Annotated[NonNegativeMeasure | None, Field(description="Share of peak.")] = None
    last_checkpoint_step: Annotated[Number | None, Field(description="Newest complete checkpoint.")] = None
    save_seconds: Annotated[Duration | None, Field(description="How long the last save took.")] = None
    stepping_seconds: Annotated[
        Duration | None,
        Field(description="From the beginning of the first step of these ranks to the end of this one."),
    ] = None
    measures: Annotated[
        dict[MeasureName, Measure],
        Field(max_length=MOST_MEASURES, description="Other numbers of the last step, by their names in its log."),
    ] = {}
    hub_commits: Annotated[
        Annotated[tuple[HubCommit, ...], Field(max_length=MOST_HUB_COMMITS, fail_fast=True)] | None,
        Field(description="What hub.json binds the run to."),
    ] = None


class PodOutcome(StrEnum):
    """The end of a pod, in its own words."""

    COMPLETED = "Completed"
    PREEMPTED = "Preempted"
    BAD_CONFIGURATION = "BadConfiguration"
    RANK_FAILED = "RankFailed"
    HUNG = "Hung"
    LOST_PEERS = "LostPeers"


class RankFault(ApiModel):
    """The reason why a launcher has restarted its ranks in place."""

    outcome: Annotated[PodOutcome, Field(description="RankFailed or Hung.")]
    message: Annotated[PrintableText, Field(max_length=512, description="One sentence, with the last log line.")] = ""
    rank: Annotated[Number | None, Field(description="Global rank to blame.")] = None
    exit_code: Annotated[
        ExitStatus | None, Field(description="Exit code of that rank; a negative one is a signal.")
    ] = None


class PodProgress(ApiModel):
    """The body of GET /progress."""

    attempt: Annotated[Number, Field(description="Attempt the pod belongs to.")]
    index: Annotated[Number, Field(description="Index of the pod.")]
    restarts: Annotated[Number, Field(description="Restarts of ranks inside this pod.")] = 0
    fault: Annotated[RankFault | None, Field(description="What the last of these restarts was for.")] = None
    ready: Annotated[bool, Field(description="Every rank of the pod has sent a heartbeat.")] = False
    ranks: Annotated[
        tuple[ReportedHeartbeat, ...],
        Field(max_length=MOST_RANKS_OF_A_POD, fail_fast=True, description="One entry for each living rank."),
    ] = ()
    run: Annotated[RunProgress | None, Field(description="The run; from the pod of rank 0 only.")] = None
    phase: Annotated[
        PrintableText | None,
        Field(max_length=64, description="Phase of the rank that is furthest behind, with its share."),
    ] = None
    phase_seconds: Annotated[Duration | None, Field(description="How long it has been in that phase.")] = None


class TerminationMessage(ApiModel):
    """The JSON a launcher leaves in the termination message."""

    outcome: Annotated[PodOutcome, Field(description="How it ended.")]
    message: Annotated[PrintableText, Field(max_length=2048, description="One sentence, or the last log line.")] = ""
    rank: Annotated[Number | None, Field(description="Global rank to blame.")] = None
    exit_code: Annotated[ExitStatus | None, Field(description="Exit code of that rank.")] = None
    step: Annotated[Number | None, Field(description="Steps done.")] = None
    run: Annotated[RunProgress | None, Field(description="The run as it was left; from the pod of rank 0 only.")] = None
    restarts: Annotated[Number, Field(description="Restarts of ranks inside this pod.")] = 0
    fault: Annotated[RankFault | None, Field(description="What the last of these restarts was for.")] = None


class RunOwner(ApiModel):
    """The job that a run folder belongs to, as its owner file says."""

    job: Annotated[str, Field(min_length=1, description="Name of the job.")]
    uid: Annotated[str, Field(min_length=1, description="UID of the job: another of the same name is another job.")]


_TOKEN_NAME = re.compile(r"([0-9]{10})\.([0-9]{10})(\.[0-9a-f]{64})?")


def fence_token_name(attempt: int, restart: int) -> str:
    """The number by which one start of all ranks claims a run folder: the first part of a file name, before the proof.

    Zero-padded, so that names order as numbers do.
    """
    return f"{attempt:010d}.{restart:010d}"


def parse_token_name(name: str) -> tuple[int, int] | None:
    """Attempt and restart in a claim's file name, proven or not; None for any other file name."""
    name_match = _TOKEN_NAME.fullmatch(name)
    return None if name_match is None else (int(name_match[1]), int(name_match[2]))


def pod_name(job: str, role: PodRole, attempt: int, index: int) -> str:
    """The name of a pod. Zero-padded: launchers are ordered by address as text, and 10 must come after 9."""
    return f"{job}-{role}-{attempt}-{index:05d}"
