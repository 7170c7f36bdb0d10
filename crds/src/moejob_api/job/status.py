"""The status of a job. Recomputed as a whole, never patched from memory."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from moejob_api.job.base import ApiModel
from moejob_api.job.phase import Phase as Phase  # noqa: PLC0414 a program that only lists jobs needs no model
from moejob_api.job.pod_template import FreeObject

Number = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0.0)]
# RFC 3339, as Kubernetes writes it.
Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class ConditionType(StrEnum):
    """The aspect that a condition is about."""

    ACCEPTED = "Accepted"
    MODEL_UNCHECKED = "ModelUnchecked"
    PODS_CREATED = "PodsCreated"
    RUNNING = "Running"
    CHECKPOINTED = "Checkpointed"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SUSPENDED = "Suspended"
    RESTARTING = "Restarting"
    ROUTER_COLLAPSED = "RouterCollapsed"
    NOTHING_LEARNED = "NothingLearned"


class ConditionStatus(StrEnum):
    """`status` of a condition, as in Kubernetes."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One aspect of the job, as in Kubernetes."""

    type: Annotated[ConditionType, Field(description="What the condition is about.")]
    status: Annotated[ConditionStatus, Field(description="True, False or Unknown.")]
    reason: Annotated[str, Field(max_length=1024, description="Why, in one CamelCase word.")]
    message: Annotated[str, Field(max_length=32_768, description="Why, in a sentence.")] = ""
    last_transition_time: Annotated[Timestamp, Field(description="When status last changed.")]
    observed_generation: Annotated[Number | None, Field(description="Generation of the spec this speaks of.")] = None


class LayoutStatus(ApiModel):
    """The layout that the operator derived from spec.parallelism."""

    gpus: Annotated[Number, Field(description="GPUs of trainer pods, spares included, and of separate rollout pods.")]
    nodes: Annotated[Number, Field(description="Trainer pods that train, one on each node.")]
    spares: Annotated[Number, Field(description="Further trainer pods, one on each node.")] = 0
    gpus_per_pod: Annotated[Number, Field(description="GPUs of one trainer pod.")]
    tensor: Annotated[Number, Field(description="Tensor parallel size.")]
    pipeline: Annotated[Number, Field(description="Pipeline stages.")]
    virtual_pipeline: Annotated[Number, Field(description="Model chunks per stage.")]
    context: Annotated[Number, Field(description="Context parallel size.")]
    data: Annotated[Number, Field(description="Data parallel size of the layers without experts.")]
    expert: Annotated[Number, Field(description="Expert parallel size.")]
    expert_tensor: Annotated[Number, Field(description="Tensor parallel size of the experts.")]
    expert_data: Annotated[Number, Field(description="Data parallel size of the experts.")]
    rollout_gpus: Annotated[Number, Field(description="GPUs of separate rollout pods.")] = 0
    memory_per_gpu_bytes: Annotated[Number | None, Field(description="Estimated need of the fullest GPU.")] = None


class ReplacedPod(ApiModel):
    """A pod whose failure has been answered for."""

    index: Annotated[Number, Field(description="Index of the pod.")]
    uid: Annotated[str, Field(max_length=64, description="UID of the pod that failed; empty when it had vanished.")]


# Beyond this many at once a whole new gang costs no more.
MAX_REPLACED = 64


class RestartLadder(ApiModel):
    """The operator's memory between two reconciles, by which every failure is charged exactly once."""

    in_place: Annotated[Number, Field(description="Ranks restarted in place since the last new checkpoint.")] = 0
    pods: Annotated[Number, Field(description="Decisions to replace pods since the last new checkpoint.")] = 0
    uncounted: Annotated[Number, Field(description="Restarts that do not count since the last new checkpoint.")] = 0
    checkpoint_step: Annotated[
        Number | None, Field(description="Highest step of a checkpoint so far: a higher one renews the budget.")
    ] = None
    rank_restarts: Annotated[
        Number | None,
        Field(
            description="Restarts in place of the present pods that were charged. Absent after a pod was replaced: the "
            "next report of all pods sets it."
        ),
    ] = None
    gang_was_whole: Annotated[
        bool, Field(description="Every pod of the present gang has existed: one that is missing now was lost.")
    ] = False
    replacing: Annotated[
        tuple[ReplacedPod, ...],
        Field(max_length=MAX_REPLACED, description="Pods being replaced, until the gang is whole and ready again."),
    ] = ()
    start_after: Annotated[
        Timestamp | None,
        Field(description="Before this no new pod is created. Kept until the gang is whole and ready again."),
    ] = None


class Restarts(ApiModel):
    """Counts of restarts."""

    total: Annotated[Number, Field(description="All restarts of the gang.")] = 0
    since_checkpoint: Annotated[
        Number, Field(description="Failures since the last new checkpoint; lifecycle.backoffLimit bounds these.")
    ] = 0
    pods: Annotated[Number, Field(description="Pods replaced without replacing the gang.")] = 0
    ranks: Annotated[Number, Field(description="Restarts of ranks inside living pods.")] = 0
    preemptions: Annotated[
        Number, Field(description="Restarts that do not count: preemption, eviction, node loss.")
    ] = 0
    ladder: Annotated[RestartLadder, Field(description="What is remembered between decisions.")] = RestartLadder()


class ReplicaStatus(ApiModel):
    """Pods of one role."""

    role: Annotated[str, Field(description="trainer or rollout.")]
    desired: Annotated[Number, Field(description="Pods there should be.")] = 0
    pending: Annotated[Number, Field(description="Pods not yet running.")] = 0
    running: Annotated[Number, Field(description="Pods running.")] = 0
    ready: Annotated[Number, Field(description="Pods whose ranks report progress.")] = 0
    succeeded: Annotated[Number, Field(description="Pods that finished.")] = 0
    failed: Annotated[Number, Field(description="Pods that failed.")] = 0


class RepositoryKind(StrEnum):
    """The kind of a repository on the Hugging Face hub."""

    MODEL = "model"
    DATASET = "dataset"


# More data sets than a job has; etcd keeps what is said of each.
MOST_HUB_COMMITS = 64


class HubCommit(ApiModel):
    """The commit that a name on the Hugging Face hub stands for in this run."""

    kind: Annotated[RepositoryKind, Field(description="model or dataset.")]
    name: Annotated[str, Field(max_length=256, pattern=r"^[!-~]+$", description="Name on the hub.")]
    commit: Annotated[str, Field(max_length=40, pattern=r"^[0-9a-f]{40}$", description="Commit that the run uses.")]


class Progress(ApiModel):
    """The progress of the run, as rank 0 last reported it."""

    step: Annotated[Number, Field(description="Steps done.")]
    total_steps: Annotated[Number | None, Field(description="Steps of the whole run.")] = None
    epoch: Annotated[Ratio | None, Field(description="Passes over the data done.")] = None
    loss: Annotated[float | None, Field(description="Loss of the last step.")] = None
    reward: Annotated[float | None, Field(description="Mean reward of the last step.")] = None
    eval_loss: Annotated[float | None, Field(description="Loss of the newest evaluation over all its sets.")] = None
    eval_score: Annotated[
        float | None, Field(description="The newest evaluation by training.bestBy: a loss, or a reward.")
    ] = None
    best_score: Annotated[float | None, Field(description="The best evaluation so far.")] = None
    best_step: Annotated[Number | None, Field(description="Step of the best evaluation.")] = None
    tokens_per_second_per_gpu: Annotated[Ratio | None, Field(description="Speed.")] = None
    mfu: Annotated[Ratio | None, Field(description="Share of the GPUs' peak that does model FLOPs.")] = None
    last_checkpoint_step: Annotated[Number | None, Field(description="Step of the newest complete checkpoint.")] = None
    save_seconds: Annotated[Ratio | None, Field(description="How long the last save took.")] = None
    hub_commits: Annotated[
        tuple[HubCommit, ...] | None,
        Field(
            max_length=MOST_HUB_COMMITS,
            description="Commits of the Hugging Face hub that the run and every restart of it use.",
        ),
    ] = None
    updated_at: Annotated[Timestamp, Field(description="When this was read.")]


class DisplayTexts(ApiModel):
    """Formatted texts for kubectl's columns."""

    step: Annotated[str, Field(description="Steps done of all; before and after them the phase.")] = ""
    score: Annotated[str, Field(description="Loss or reward of the last step.")] = ""
    eval_score: Annotated[str, Field(description="The newest evaluation by training.bestBy.")] = ""
    eval_loss: Annotated[str, Field(description="Loss of the newest evaluation.")] = ""
    speed: Annotated[str, Field(description="Tokens a second a GPU.")] = ""
    eta: Annotated[str, Field(description="Time left.")] = ""


class Goodput(ApiModel):
    """The goodput since pods were first created: four sums that share it among them."""

    productive_seconds: Annotated[Ratio, Field(description="Seconds in steps that were kept.")] = 0.0
    lost_seconds: Annotated[
        Ratio,
        Field(description="Seconds lost to failures: steps done again, silence, and starts until the first step."),
    ] = 0.0
    starting_seconds: Annotated[
        Ratio,
        Field(description="Seconds from the creation of pods to their first step, but for starts after failures."),
    ] = 0.0
    suspended_seconds: Annotated[Ratio, Field(description="Seconds suspended, now ended.")] = 0.0
    lost_gpu_hours: Annotated[Ratio, Field(description="GPU hours lost to failures, while pods held the GPUs.")] = 0.0
    updated_at: Annotated[Timestamp | None, Field(description="The end of the time that is counted.")] = None


class LastFailure(ApiModel):
    """The failure seen last."""

    time: Annotated[Timestamp, Field(description="When it was seen.")]
    pod: Annotated[str, Field(description="Pod.")]
    node: Annotated[str | None, Field(description="Node.")] = None
    rank: Annotated[Number | None, Field(description="Global rank, when one rank is to blame.")] = None
    exit_code: Annotated[int | None, Field(description="Exit code.")] = None
    reason: Annotated[str, Field(max_length=1024, description="Why, in one CamelCase word.")]
    message: Annotated[str, Field(max_length=4096, description="Last log line or error.")] = ""


class Diagnosis(ApiModel):
    """The obstacle of a job that does not train."""

    # Text, not a closed list: a definition of an earlier release takes the words of a later operator.
    blocker: Annotated[str, Field(max_length=64, description="The obstacle, in one CamelCase word.")]
    since: Annotated[Timestamp, Field(description="When it began.")]
    message: Annotated[str, Field(max_length=4096, description="What is wrong, in a sentence.")]
    next: Annotated[str, Field(max_length=1024, description="What follows when no person acts.")]
    fix: Annotated[str, Field(max_length=1024, description="What a person can do about it.")]


class AppliedProfile(ApiModel):
    """The profile of a job as it was when the job was accepted; no later change of it reaches the job."""

    kind: Annotated[str, Field(max_length=64, description="MoETrainingProfile or ClusterMoETrainingProfile.")]
    name: Annotated[str, Field(max_length=253, description="Name of the profile.")]
    uid: Annotated[str, Field(max_length=64, description="UID of the profile.")]
    generation: Annotated[Number, Field(description="Generation of the profile's spec.")]
    values: Annotated[FreeObject, Field(description="Fields of the job's spec that the profile has set, merged.")]


class Status(ApiModel):
    """The status that the operator writes."""

    phase: Annotated[Phase | None, Field(description="Where the job is in its life.")] = None
    conditions: Annotated[tuple[Condition, ...], Field(max_length=32, description="What holds and why.")] = ()
    observed_generation: Annotated[Number | None, Field(description="Generation of the spec this speaks of.")] = None
    profile: Annotated[
        AppliedProfile | None, Field(description="What the job has from spec.profile, as it was when accepted.")
    ] = None
    attempt: Annotated[Number, Field(description="Number of the present gang; part of the names of its pods.")] = 0
    restarts: Annotated[Restarts, Field(description="How often something had to be started again.")] = Restarts()
    layout: Annotated[LayoutStatus | None, Field(description="What follows from spec.parallelism.")] = None
    replica_statuses: Annotated[tuple[ReplicaStatus, ...], Field(max_length=8, description="Pods of each role.")] = ()
    progress: Annotated[Progress | None, Field(description="Where the run is.")] = None
    display: Annotated[DisplayTexts | None, Field(description="Formatted texts for kubectl's columns.")] = None
    goodput: Annotated[Goodput | None, Field(description="Where the time went.")] = None
    start_time: Annotated[Timestamp | None, Field(description="When pods were first created.")] = None
    completion_time: Annotated[Timestamp | None, Field(description="When the job succeeded or failed.")] = None
    last_failure: Annotated[LastFailure | None, Field(description="The failure seen last.")] = None
    why: Annotated[
        Diagnosis | None,
        Field(description="Why the job does not train, or will not for long. Absent: nothing is in its way."),
    ] = None
