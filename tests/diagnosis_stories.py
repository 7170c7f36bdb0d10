"""The stories of jobs that do not train, each one sentence, with the objects as a cluster shows them.

Messages are those of Kubernetes 1.36 (scheduler, kubelet with containerd, admission), Kueue 0.14, Volcano 1.13,
scheduler-plugins 0.33, and of our own launcher.
"""

from __future__ import annotations

from dataclasses import dataclass

from diagnosis_bodies import (
    CREATED,
    GPU,
    Body,
    claim,
    condition,
    event,
    failed_job,
    gated,
    job,
    node,
    pod,
    pod_group,
    unschedulable,
    workload,
)
from moejob_api.diagnosis.blockers import Blocker
from moejob_api.learning_signals import SignalKind, signals_text
from moejob_api.router_health import collapse_text

# What follows the reasons of nodes in every sentence of the scheduler.
PREEMPTION = (
    " no new claims to deallocate, preemption: 0/5 nodes are available: 5 Preemption is not helpful for scheduling."
)
POD = "job-trainer-0-00000"


@dataclass(frozen=True)
class Story:
    """One story: its sentence, the job, the other objects, and the diagnosis that it leads to; None: nothing is wrong."""

    sentence: str
    job: Body
    objects: tuple[Body, ...]
    blocker: Blocker | None
    message: str = ""


def scheduled(text: str) -> Body:
    """A pod of which the scheduler says this."""
    return pod(0, unschedulable(f"0/5 nodes are available: {text}.{PREEMPTION}"))


def pulled(reason: str, message: str) -> Body:
    """A pod whose image the kubelet cannot get."""
    return pod(waiting={"reason": reason, "message": message}, node="gpu-1")


def refused(message: str, reason: str = "CreationRefused") -> Body:
    """A job whose pods the API server refuses."""
    return job(running=(reason, message))


def restarting(reason: str, message: str, **failure: object) -> Body:
    """A job that starts again after a failure."""
    return job("Restarting", failure={"pod": POD, "reason": reason, "message": message, **failure})


def rejected(message: str) -> Body:
    """A job that its launcher has ended with exit code 78."""
    failure = {"pod": POD, "reason": "BadConfiguration", "message": message, "exitCode": 78}
    return failed_job("BadConfiguration", message, failure)


_UNBOUND = pod(
    0, unschedulable(f"0/5 nodes are available: pod has unbound immediate PersistentVolumeClaims.{PREEMPTION}")
)
_CREATING = pod(waiting={"reason": "ContainerCreating"}, node="gpu-1")
_PULL = 'failed to pull and unpack image "reg.example.com/trainer:2": failed to resolve image: '
_ENGINE_END = {
    "exitCode": 1,
    "reason": "Error",
    "message": "INFO start\nValueError: No available memory for the cache blocks\n",
}
_GONE = {"deletionTimestamp": "2030-01-01T00:20:00Z"}

STORIES: tuple[Story, ...] = (
    # --- the job itself ---
    Story(
        "a job that trains has nothing in its way",
        job("Running", ("AllPodsRun", "every trainer pod runs")),
        (pod(0, condition("Ready", "True", ""), node="gpu-1", phase="Running"),),
        None,
    ),
    Story(
        "a job trains, and its spare fits no node",
        job("Running", ("Unschedulable", f"{POD}: 0/5 nodes are available: 5 Insufficient {GPU}.{PREEMPTION}")),
        (
            pod(1, condition("Ready", "True", ""), node="gpu-1", phase="Running"),
            scheduled(f"5 Insufficient {GPU}"),
            node(),
        ),
        Blocker.INSUFFICIENT_GPUS,
        f"the gang runs, and a spare waits: {POD} fits no node: {GPU} is used up",
    ),
    Story(
        "a job trains with routers that have collapsed",
        job(
            "Running",
            ("AllPodsRun", "every trainer pod runs"),
            conditions=(condition("RouterCollapsed", "True", "ExpertsUnused", collapse_text((3, 4, 5, 12))),),
        ),
        (pod(0, condition("Ready", "True", ""), node="gpu-1", phase="Running"),),
        Blocker.ROUTER_COLLAPSED,
        "the routers of layers 3-5 and 12 collapsed: for 5 steps in a row nearly all tokens chose the same experts, or "
        "half of the experts got no token",
    ),
    Story(
        "a job trains on groups whose rewards are equal",
        job(
            "Running",
            ("AllPodsRun", "every trainer pod runs"),
            conditions=(condition("NothingLearned", "True", "EqualRewards", signals_text([SignalKind.FLAT])),),
        ),
        (pod(0, condition("Ready", "True", ""), node="gpu-1", phase="Running"),),
        Blocker.NOTHING_LEARNED,
        "little is learned: in 5 steps at least half of the groups have answers of one and the same reward",
    ),
    Story(
        "a job trains with routers that have recovered",
        job(
            "Running",
            ("AllPodsRun", "every trainer pod runs"),
            conditions=(condition("RouterCollapsed", "False", "Recovered"),),
        ),
        (pod(0, condition("Ready", "True", ""), node="gpu-1", phase="Running"),),
        None,
    ),
    Story(
        "a job that has succeeded has nothing in its way",
        job("Succeeded", ("Completed", "every rank has finished")),
        (),
        None,
    ),
    Story(
        "no operator serves the namespace",
        job(None),
        (),
        Blocker.OPERATOR_ABSENT,
        "no operator has taken up the job: its status is empty",
    ),
    Story(
        "a job was created this moment",
        job(None, metadata={"creationTimestamp": "2030-01-01T00:29:50Z"}),
        (),
        Blocker.STARTING,
        "the operator has not taken up the job yet",
    ),
    Story(
        "the layout of a job does not divide its GPUs",
        job(
            running=("Invalid", "the job was not accepted"),
            conditions=(
                condition(
                    "Accepted", "False", "NodeSize", "parallelism needs 12 GPUs, which gpusPerNode 8 does not divide"
                ),
            ),
        ),
        (),
        Blocker.JOB_REFUSED,
        "parallelism needs 12 GPUs, which gpusPerNode 8 does not divide",
    ),
    Story(
        "a job names a profile that does not exist",
        job(
            running=("ProfileMissing", "team has no MoETrainingProfile h100"),
            conditions=(
                condition("Accepted", "False", "Profile", "spec.profile: team has no MoETrainingProfile h100"),
            ),
        ),
        (),
        Blocker.PROFILE_MISSING,
        "team has no MoETrainingProfile h100",
    ),
    Story(
        "a job is suspended",
        job("Suspended", ("SuspendRequested", "x"), conditions=(condition("Suspended", "True", "SuspendRequested"),)),
        (),
        Blocker.SUSPENDED,
        "the job is suspended (lifecycle.suspend is true)",
    ),
    Story(
        "a job has succeeded and is deleted an hour later",
        job(
            "Succeeded",
            ("Completed", "every rank has finished"),
            completionTime=CREATED,
            spec={"lifecycle": {"ttlSecondsAfterFinished": 3600}},
        ),
        (),
        Blocker.JOB_EXPIRING,
        "the job has succeeded, and is deleted at 2030-01-01T01:00:00Z (lifecycle.ttlSecondsAfterFinished)",
    ),
    Story(
        "a job that is being deleted waits for its pods",
        job(metadata=_GONE | {"finalizers": ["foregroundDeletion"]}),
        (pod(metadata=_GONE, node="gpu-1"),),
        Blocker.JOB_ENDING,
        "the job is being deleted, pods that are left: 1; foregroundDeletion holds it",
    ),
    # --- refusals of the API server ---
    Story(
        "a ResourceQuota of the namespace is used up",
        refused(
            f'pods "{POD}" is forbidden: exceeded quota: gpus, requested: requests.{GPU}=8, used: requests.{GPU}=16, '
            f"limited: requests.{GPU}=16",
            "QuotaExceeded",
        ),
        (),
        Blocker.QUOTA_EXCEEDED,
        f'pods "{POD}" is forbidden: exceeded quota: gpus, requested: requests.{GPU}=8, limited: requests.{GPU}=16',
    ),
    Story(
        "the webhook of another product is down",
        refused(
            'Internal error occurred: failed calling webhook "mpod.kb.io": failed to call webhook: Post '
            '"https://kueue-webhook-service.kueue-system.svc:443/mutate--v1-pod?timeout=10s": no endpoints available '
            'for service "kueue-webhook-service"'
        ),
        (),
        Blocker.ADMISSION_WEBHOOK_DOWN,
        'Internal error occurred: failed calling webhook "mpod.kb.io": failed to call webhook: Post '
        '"https://kueue-webhook-service.kueue-system.svc:443/mutate--v1-pod?timeout=10s": no endpoints available for '
        'service "kueue-webhook-service"',
    ),
    Story(
        "a policy of the cluster denies the image",
        refused('admission webhook "validate.kyverno.svc-fail" denied the request: image registry is not allowed'),
        (),
        Blocker.ADMISSION_DENIED,
        'admission webhook "validate.kyverno.svc-fail" denied the request: image registry is not allowed',
    ),
    Story(
        "a ValidatingAdmissionPolicy denies the pods",
        refused(
            f"pods \"{POD}\" is forbidden: ValidatingAdmissionPolicy 'owners' with binding 'owners' denied request: "
            "a pod needs the label owner"
        ),
        (),
        Blocker.ADMISSION_DENIED,
        f"pods \"{POD}\" is forbidden: ValidatingAdmissionPolicy 'owners' with binding 'owners' denied request: a pod needs "
        "the label owner",
    ),
    Story(
        "the namespace enforces the restricted standard",
        refused(f'pods "{POD}" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'),
        (),
        Blocker.POD_SECURITY,
        f'pods "{POD}" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true',
    ),
    Story(
        "the service account does not exist",
        refused(
            f'pods "{POD}" is forbidden: error looking up service account team/trainer: serviceaccount "trainer" not '
            "found"
        ),
        (),
        Blocker.SERVICE_ACCOUNT_MISSING,
        f'pods "{POD}" is forbidden: error looking up service account team/trainer: serviceaccount "trainer" not found',
    ),
    Story(
        "the priority class does not exist",
        refused(f'pods "{POD}" is forbidden: no PriorityClass with name high was found'),
        (),
        Blocker.PRIORITY_CLASS_MISSING,
        f'pods "{POD}" is forbidden: no PriorityClass with name high was found',
    ),
    Story(
        "the runtime class does not exist",
        refused(f'pods "{POD}" is forbidden: pod rejected: RuntimeClass "nvidia" not found'),
        (),
        Blocker.RUNTIME_CLASS_MISSING,
        f'pods "{POD}" is forbidden: pod rejected: RuntimeClass "nvidia" not found',
    ),
    Story(
        "a LimitRange is exceeded",
        refused(f'pods "{POD}" is forbidden: maximum memory usage per Container is 64Gi, but limit is 1Ti'),
        (),
        Blocker.LIMIT_RANGE,
        f'pods "{POD}" is forbidden: maximum memory usage per Container is 64Gi, but limit is 1Ti',
    ),
    Story(
        "the namespace is being deleted",
        refused(
            f'pods "{POD}" is forbidden: unable to create new content in namespace team because it is being terminated'
        ),
        (),
        Blocker.NAMESPACE_ENDING,
        f'pods "{POD}" is forbidden: unable to create new content in namespace team because it is being terminated',
    ),
    Story(
        "a Service of another client has the name",
        refused(
            "a Service job-moejob is in the way, which this job did not create; delete it, or create the job under "
            "another name"
        ),
        (),
        Blocker.NAME_TAKEN,
        "a Service job-moejob is in the way, which this job did not create; delete it, or create the job under another "
        "name",
    ),
    Story(
        "a pod is refused for a reason without a rule",
        refused('Pod "x" is invalid: spec.hostname: Invalid value'),
        (),
        Blocker.CREATION_REFUSED,
        'Pod "x" is invalid: spec.hostname: Invalid value',
    ),
    # --- queues and gangs ---
    Story(
        "the gang scheduler is not installed",
        job(running=("GangApiMissing", "lifecycle.gang Volcano needs scheduling.volcano.sh/v1beta1")),
        (),
        Blocker.GANG_SCHEDULER_MISSING,
        "lifecycle.gang Volcano needs scheduling.volcano.sh/v1beta1",
    ),
    Story(
        "Kubernetes cannot place the whole gang",
        job(),
        (
            pod(
                0,
                unschedulable("pod group is unschedulable, minCount (4) cannot be satisfied: 3 scheduled, 0 remaining"),
            ),
        ),
        Blocker.GANG_INCOMPLETE,
        "not all pods of the gang fit at once: pod group is unschedulable, minCount (4) cannot be satisfied: scheduled, "
        "remaining",
    ),
    Story(
        "Volcano cannot place the whole gang",
        job(),
        (
            pod_group(
                "scheduling.volcano.sh/v1beta1",
                condition(
                    "Unschedulable",
                    "True",
                    "NotEnoughResources",
                    "3/4 tasks in gang unschedulable: pod group is not ready, 4 minAvailable",
                ),
                phase="Inqueue",
            ),
            pod(0, condition("PodScheduled", "False", "Unschedulable", "3/4 tasks in gang unschedulable")),
        ),
        Blocker.GANG_INCOMPLETE,
        "not all pods of the gang fit at once: tasks in gang unschedulable",
    ),
    Story(
        "the coscheduling plugin waits for siblings",
        job(),
        (
            scheduled(
                "5 pre-filter pod job-trainer-0-00000 cannot find enough sibling pods, current pods number: 2, "
                "minMember of group: 4"
            ),
        ),
        Blocker.GANG_INCOMPLETE,
        "not all pods of the gang fit at once: nodes are available: pre-filter pod job-trainer-0-00000 cannot find enough "
        "sibling pods, current pods number: 2, minMember of group: 4",
    ),
    Story(
        "the pods wait behind the gate of a queue that nobody may read",
        job(),
        (pod(0, gated(), labels={"kueue.x-k8s.io/queue-name": "team"}),),
        Blocker.QUEUE_PENDING,
        "queue team has not admitted the job",
    ),
    Story(
        "the quota of the ClusterQueue is used up",
        job(),
        (
            pod(0, gated()),
            workload(
                condition(
                    "QuotaReserved",
                    "False",
                    "Pending",
                    f"couldn't assign flavors to pod set main: insufficient unused quota for {GPU} in flavor default, 8 more "
                    "needed",
                )
            ),
        ),
        Blocker.QUEUE_QUOTA,
        f"Kueue has not admitted the job: couldn't assign flavors to pod set main: insufficient unused quota for {GPU} in "
        "flavor default, 8 more needed",
    ),
    Story(
        "the job is larger than its queue",
        job(),
        (
            pod(0, gated()),
            workload(
                condition(
                    "QuotaReserved",
                    "False",
                    "Pending",
                    f"couldn't assign flavors to pod set main: insufficient quota for {GPU} in flavor default, request > maximum "
                    "capacity (32 > 16)",
                )
            ),
        ),
        Blocker.QUEUE_TOO_SMALL,
        f"Kueue has not admitted the job: couldn't assign flavors to pod set main: insufficient quota for {GPU} in flavor "
        "default, request > maximum capacity (32 > 16)",
    ),
    Story(
        "the queue does not exist",
        job(),
        (
            pod(0, gated()),
            workload(condition("QuotaReserved", "False", "Inadmissible", "LocalQueue team doesn't exist")),
        ),
        Blocker.QUEUE_MISSING,
        "Kueue has not admitted the job: LocalQueue team doesn't exist",
    ),
    Story(
        "the queue is stopped",
        job(),
        (
            pod(0, gated()),
            workload(condition("QuotaReserved", "False", "Inadmissible", "ClusterQueue all is inactive")),
        ),
        Blocker.QUEUE_INACTIVE,
        "Kueue has not admitted the job: ClusterQueue all is inactive",
    ),
    Story(
        "an admission check waits for new nodes",
        job(),
        (
            pod(0, gated()),
            workload(
                condition("QuotaReserved", "True", "QuotaReserved"),
                checks=(
                    {
                        "name": "dws",
                        "state": "Pending",
                        "message": "Waiting for resources",
                        "lastTransitionTime": CREATED,
                    },
                ),
            ),
        ),
        Blocker.QUEUE_CHECK,
        "admission check dws is Pending: Waiting for resources",
    ),
    Story(
        "Kueue has evicted the job for another of higher priority",
        job(),
        (
            pod(0, gated()),
            workload(
                condition("QuotaReserved", "False", "Pending", "insufficient unused quota"),
                condition(
                    "Evicted",
                    "True",
                    "Preempted",
                    "Preempted to accommodate a workload (UID: u, JobUID: j) due to prioritization in the ClusterQueue",
                ),
            ),
        ),
        Blocker.QUEUE_EVICTED,
        "Kueue has evicted the job: Preempted to accommodate a workload (UID: u, JobUID: j) due to prioritization in the "
        "ClusterQueue",
    ),
    Story(
        "Kueue stops the pods of a job that runs",
        job("Running", ("AllPodsRun", "every trainer pod runs")),
        (
            pod(
                0,
                condition(
                    "TerminationTarget",
                    "True",
                    "WorkloadEvictedDueToPreempted",
                    "Preempted to accommodate a higher priority Workload",
                ),
                node="gpu-1",
                phase="Running",
            ),
        ),
        Blocker.QUEUE_EVICTED,
        f"Kueue has stopped {POD}: Preempted to accommodate a higher priority Workload",
    ),
    Story(
        "Kueue has deactivated the job after too many evictions",
        job(),
        (
            pod(0, gated()),
            workload(
                condition(
                    "Evicted",
                    "True",
                    "Deactivated",
                    "The workload is deactivated due to exceeding the maximum number of re-queuing retries",
                ),
                active=False,
            ),
        ),
        Blocker.QUEUE_DEACTIVATED,
        "Kueue has deactivated the job: The workload is deactivated due to exceeding the maximum number of re-queuing "
        "retries",
    ),
    # --- nodes ---
    Story(
        "no scheduler of that name runs",
        job(),
        (pod(),),
        Blocker.SCHEDULER_ABSENT,
        "no scheduler default-scheduler has looked at the pods of the job",
    ),
    Story(
        "all GPUs are in use",
        job(),
        (
            scheduled(
                f"1 node(s) had untolerated taint {{node-role.kubernetes.io/control-plane: }}, 4 Insufficient {GPU}"
            ),
            node(),
        ),
        Blocker.INSUFFICIENT_GPUS,
        f"{POD} fits no node: {GPU} is used up",
    ),
    Story(
        "no node has a device plugin",
        job(),
        (scheduled(f"5 Insufficient {GPU}"), node("cpu-1", None), node("cpu-2", None)),
        Blocker.RESOURCE_UNKNOWN,
        f"no node of the cluster offers {GPU}",
    ),
    Story(
        "the GPU nodes have a taint of their own",
        job(),
        (scheduled(f"4 node(s) had untolerated taint {{dedicated: training}}, 1 Insufficient {GPU}"),),
        Blocker.TAINT,
        f"{POD} fits no node: nodes have the taint dedicated=training, which the job does not tolerate; {GPU} is used up",
    ),
    Story(
        "no node has the label of the selector",
        job(),
        (scheduled("5 node(s) didn't match Pod's node affinity/selector"),),
        Blocker.NODE_SELECTOR,
        f"{POD} fits no node: nodes lack a label of resources.nodeSelector",
    ),
    Story(
        "no domain of the network holds the whole group",
        job(),
        (scheduled("5 node(s) didn't match pod affinity rules"),),
        Blocker.POD_AFFINITY,
        f"{POD} fits no node: nodes lie outside of the domain of the group (resources.topologyKey)",
    ),
    Story(
        "no node has that much memory",
        job(),
        (scheduled("5 Insufficient memory"),),
        Blocker.INSUFFICIENT_MEMORY,
        f"{POD} fits no node: memory is used up",
    ),
    Story(
        "no node has that many cores",
        job(),
        (scheduled("2 Insufficient cpu, 3 Insufficient cpu"),),
        Blocker.INSUFFICIENT_CPU,
        f"{POD} fits no node: cpu is used up",
    ),
    Story(
        "the network cards are in use",
        job(),
        (scheduled("5 Insufficient rdma/hca"),),
        Blocker.INSUFFICIENT_RESOURCE,
        f"{POD} fits no node: rdma/hca is used up",
    ),
    Story(
        "all nodes are cordoned",
        job(),
        (scheduled("5 node(s) were unschedulable"),),
        Blocker.NODES_UNAVAILABLE,
        f"{POD} fits no node: nodes are cordoned",
    ),
    Story(
        "all nodes are silent",
        job(),
        (scheduled("5 node(s) had untolerated taint {node.kubernetes.io/unreachable: }"),),
        Blocker.NODES_UNAVAILABLE,
        f"{POD} fits no node: nodes are unavailable (node.kubernetes.io/unreachable)",
    ),
    Story(
        "the cluster has no node",
        job(),
        (pod(0, unschedulable("no nodes available to schedule pods")),),
        Blocker.NO_NODES,
        "the cluster has no node for pods",
    ),
    Story(
        "the cluster has a control plane only",
        job(),
        (scheduled("5 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }"),),
        Blocker.NO_NODES,
        "the cluster has no node but its control plane",
    ),
    Story(
        "only the job can be read, and its condition has the scheduler's sentence",
        job(running=("Unschedulable", f"{POD}: 0/5 nodes are available: 5 Insufficient {GPU}.{PREEMPTION}")),
        (),
        Blocker.INSUFFICIENT_GPUS,
        f"{POD} fits no node: {GPU} is used up",
    ),
    # --- volumes ---
    Story(
        "the storage class does not exist",
        job(),
        (_UNBOUND, claim(), event(claim(), "ProvisioningFailed", 'storageclass.storage.k8s.io "fast" not found')),
        Blocker.STORAGE_CLASS_MISSING,
        "claim job-storage needs storage class fast, which does not exist",
    ),
    Story(
        "the cluster has no default storage class",
        job(),
        (_UNBOUND, claim(storage_class=None)),
        Blocker.STORAGE_CLASS_MISSING,
        "claim job-storage names no storage class, and the cluster has no default",
    ),
    Story(
        "a claim is not bound yet",
        job(),
        (_UNBOUND, claim()),
        Blocker.CLAIM_UNBOUND,
        "claim job-storage of storage class fast is not bound to a volume yet",
    ),
    Story(
        "the provisioner cannot make the volume",
        job(),
        (
            _UNBOUND,
            claim(),
            event(claim(), "ProvisioningFailed", "rpc error: code = ResourceExhausted desc = no space"),
        ),
        Blocker.PROVISIONING_FAILED,
        "the volume of claim job-storage cannot be made: rpc error: code = ResourceExhausted desc = no space",
    ),
    Story(
        "the claim that the job names does not exist",
        job(),
        (scheduled('persistentvolumeclaim "training" not found'),),
        Blocker.CLAIM_MISSING,
        "there is no claim training",
    ),
    Story(
        "the claim that the job names is being deleted",
        job(),
        (scheduled('persistentvolumeclaim "training" is being deleted'),),
        Blocker.CLAIM_ENDING,
        "claim training is being deleted",
    ),
    Story(
        "the volume of a claim is gone",
        job(),
        (_CREATING, claim(phase="Lost")),
        Blocker.CLAIM_LOST,
        "the volume of claim job-storage is gone",
    ),
    Story(
        "the volume is in a zone without free nodes",
        job(),
        (scheduled("5 node(s) didn't match PersistentVolume's node affinity"),),
        Blocker.VOLUME_ELSEWHERE,
        f"{POD} fits no node: nodes do not reach the volume of the job",
    ),
    Story(
        "the volume is still attached to another node",
        job(),
        (
            _CREATING,
            event(
                _CREATING,
                "FailedAttachVolume",
                'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached to one node and can\'t be '
                "attached to another",
            ),
        ),
        Blocker.VOLUME_ATTACHED,
        f'the volume of {POD} is held by another node: Multi-Attach error for volume "pvc-1" Volume is already exclusively '
        "attached to one node and can't be attached to another",
    ),
    Story(
        "the file server does not answer",
        job(),
        (
            _CREATING,
            event(
                _CREATING,
                "FailedMount",
                'MountVolume.SetUp failed for volume "nfs" : mount failed: exit status 32 Connection timed out',
            ),
        ),
        Blocker.MOUNT_FAILED,
        f'a volume of {POD} cannot be mounted: MountVolume.SetUp failed for volume "nfs" : mount failed: exit status 32 '
        "Connection timed out",
    ),
    Story(
        "a mount failed once, and the pod has come further since",
        job(),
        (
            _CREATING,
            event(_CREATING, "FailedMount", "MountVolume.SetUp failed", "2030-01-01T00:05:00Z"),
            event(_CREATING, "Pulled", "Successfully pulled image", "2030-01-01T00:06:00Z"),
        ),
        Blocker.STARTING,
        "the pods of the job start",
    ),
    Story(
        "an event of a pod that is gone says nothing",
        job(),
        (_CREATING, event(pod(5, node="gpu-1"), "FailedMount", "MountVolume.SetUp failed")),
        Blocker.STARTING,
        "the pods of the job start",
    ),
    # --- containers ---
    Story(
        "the image has a name that is none",
        job(),
        (
            pulled(
                "InvalidImageName",
                'Failed to apply default image tag "Reg/x": couldn\'t parse image name: invalid reference '
                "format: repository name must be lowercase",
            ),
        ),
        Blocker.IMAGE_NAME,
        "moejob-trainer:1 is no name of an image",
    ),
    Story(
        "there is no such image",
        job(),
        (
            pulled(
                "ImagePullBackOff",
                'Back-off pulling image "reg.example.com/trainer:2": ErrImagePull: rpc error: code = '
                f"NotFound desc = {_PULL}reg.example.com/trainer:2: not found",
            ),
        ),
        Blocker.IMAGE_MISSING,
        "there is no image reg.example.com/trainer:2",
    ),
    Story(
        "the pull secret is missing",
        job(),
        (
            pulled(
                "ErrImagePull",
                f"rpc error: code = Unknown desc = {_PULL}pull access denied, repository does not exist or "
                "may require authorization: authorization failed: no basic auth credentials",
            ),
        ),
        Blocker.IMAGE_PULL_DENIED,
        "the registry refuses image reg.example.com/trainer:2 to the pods",
    ),
    Story(
        "the registry is away",
        job(),
        (pulled("ErrImagePull", f"rpc error: code = Unavailable desc = {_PULL}dial tcp 10.0.0.1:443: i/o timeout"),),
        Blocker.IMAGE_PULL_FAILED,
        f"image reg.example.com/trainer:2 cannot be pulled: {_PULL}dial tcp 10.0.0.1:443: i/o timeout",
    ),
    Story(
        "an image is pulled for the first time",
        job(),
        (_CREATING, event(_CREATING, "Pulling", 'Pulling image "x"')),
        Blocker.IMAGE_PULLING,
        f"node gpu-1 pulls the image of {POD}",
    ),
    Story(
        "a Secret of the environment does not exist",
        job(),
        (pulled("CreateContainerConfigError", 'secret "wandb" not found'),),
        Blocker.SECRET_MISSING,
        "there is no Secret wandb",
    ),
    Story(
        "a Secret lacks a key",
        job(),
        (pulled("CreateContainerConfigError", "couldn't find key token in Secret team/hugging-face"),),
        Blocker.SECRET_MISSING,
        "Secret hugging-face has no key token",
    ),
    Story(
        "a ConfigMap of the environment does not exist",
        job(),
        (pulled("CreateContainerConfigError", 'configmap "nccl" not found'),),
        Blocker.CONFIG_MAP_MISSING,
        "there is no ConfigMap nccl",
    ),
    Story(
        "the container runtime cannot start the container",
        job(),
        (
            pulled(
                "RunContainerError",
                "nvidia-container-cli: initialization error: driver error: failed to process request",
            ),
        ),
        Blocker.CONTAINER_REFUSED,
        f"{POD} does not start (RunContainerError): nvidia-container-cli: initialization error: driver error: failed to "
        "process request",
    ),
    Story(
        "the network of a node is broken",
        job(),
        (_CREATING, event(_CREATING, "FailedCreatePodSandBox", 'plugin type="cilium-cni" failed (add): timeout')),
        Blocker.SANDBOX_FAILED,
        f'node gpu-1 cannot set up {POD}: plugin type="cilium-cni" failed (add): timeout',
    ),
    Story("pods start as they should", job(), (_CREATING,), Blocker.STARTING, "the pods of the job start"),
    # --- pods that go ---
    Story(
        "a pod of higher priority takes the place",
        job("Running", ("AllPodsRun", "every trainer pod runs")),
        (
            pod(
                0,
                condition("DisruptionTarget", "True", "PreemptionByScheduler", "default-scheduler: preempting"),
                node="gpu-1",
                phase="Running",
            ),
        ),
        Blocker.PREEMPTED,
        f"a pod of higher priority takes the place of {POD}",
    ),
    Story(
        "a node is drained",
        job("Running", ("AllPodsRun", "every trainer pod runs")),
        (
            pod(
                0,
                condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting"),
                node="gpu-1",
                phase="Running",
            ),
        ),
        Blocker.EVICTED,
        f"{POD} is evicted from node gpu-1, as by a drain",
    ),
    Story(
        "a node is short of disk and puts the pod out",
        job("Restarting"),
        (
            pod(
                node="gpu-1",
                phase="Failed",
                reason="Evicted",
                message="The node was low on resource: ephemeral-storage.",
            ),
        ),
        Blocker.EVICTED,
        f"node gpu-1 has put {POD} out: The node was low on resource: ephemeral-storage.",
    ),
    Story(
        "nothing is heard of a node",
        job("Running", ("AllPodsRun", "every trainer pod runs")),
        (
            pod(
                0,
                condition("Ready", "False", ""),
                condition("ContainersReady", "True", ""),
                node="gpu-1",
                phase="Running",
            ),
        ),
        Blocker.NODE_LOST,
        f"nothing is heard of node gpu-1, where {POD} runs",
    ),
    Story(
        "a node says itself that it is silent",
        job("Running", ("AllPodsRun", "every trainer pod runs")),
        (pod(0, condition("Ready", "True", ""), node="gpu-1", phase="Running"), node(ready="Unknown")),
        Blocker.NODE_LOST,
        f"nothing is heard of node gpu-1, where {POD} runs",
    ),
    Story(
        "the next gang waits for the old pods",
        job("Restarting", ("OldPodsLeft", "waiting for the pods of the last attempt to end"), attempt=1),
        (pod(metadata={"deletionTimestamp": "2030-01-01T00:35:00Z"}, node="gpu-1", phase="Running"),),
        Blocker.POD_ENDING,
        f"{POD} ends, and the next pods wait for it: two gangs would write to one volume",
    ),
    Story(
        "a dead kubelet does not confirm the end of a pod",
        job("Restarting", ("OldPodsLeft", "x"), attempt=1),
        (pod(metadata=_GONE, node="gpu-1", phase="Running"),),
        Blocker.POD_STUCK,
        f"{POD} should have ended, and node gpu-1 does not confirm it",
    ),
    Story(
        "the pods of an earlier job of this name still end",
        job(running=("NameTaken", "pod job-trainer-0-00000 belongs to an earlier job of this name")),
        (),
        Blocker.POD_ENDING,
        "pod job-trainer-0-00000 belongs to an earlier job of this name",
    ),
    Story(
        "the operator may not delete pods",
        job("Restarting", ("DeletionRefused", 'pods "x" is forbidden')),
        (),
        Blocker.DELETION_REFUSED,
        'pods "x" is forbidden',
    ),
    # --- the run ---
    Story(
        "a rank has run out of GPU memory",
        restarting(
            "RankFailed",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            rank=3,
            node="gpu-1",
        ),
        (),
        Blocker.GPU_OUT_OF_MEMORY,
        f"rank 3 of {POD} on node gpu-1 failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ),
    Story(
        "the kernel has killed a container for its memory",
        restarting("OutOfMemory", "exit code 137", exitCode=137),
        (),
        Blocker.HOST_OUT_OF_MEMORY,
        f"{POD} failed: exit code 137",
    ),
    Story(
        "a rank was killed for the memory of the pod",
        restarting("RankFailed", "rank 1 was killed by signal 9, out of memory; raise resources.memory", rank=1),
        (),
        Blocker.HOST_OUT_OF_MEMORY,
        f"rank 1 of {POD} failed: rank 1 was killed by signal 9, out of memory; raise resources.memory",
    ),
    Story(
        "the shared memory of a pod is full",
        restarting(
            "RankFailed",
            "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888): No space left on device",
            rank=0,
        ),
        (),
        Blocker.SHARED_MEMORY_FULL,
        f"rank 0 of {POD} failed: Error while creating shared memory segment /dev/shm/nccl-x (size 9637888): No space left on "
        "device",
    ),
    Story(
        "ranks hang in a collective",
        restarting("Hung", "ranks 2, 3 silent", rank=2),
        (),
        Blocker.RANKS_HUNG,
        f"rank 2 of {POD} failed: ranks 2, 3 silent",
    ),
    Story(
        "a rank has raised an error",
        restarting("RankFailed", "ZeroDivisionError: division by zero", rank=0),
        (),
        Blocker.RANK_FAILED,
        f"rank 0 of {POD} failed: ZeroDivisionError: division by zero",
    ),
    Story(
        "the launcher of a pod has ended without a word",
        restarting("PodFailed", "", exitCode=1),
        (),
        Blocker.POD_FAILED,
        f"{POD} failed: exit code 1",
    ),
    Story(
        "a GPU has fallen off the bus",
        restarting("RankFailed", "rank 7 needs GPU 7 of its pod, which has 7; check the device plugin", node="gpu-1"),
        (),
        Blocker.GPU_MISSING,
        f"{POD} on node gpu-1 failed: rank 7 needs GPU 7 of its pod, which has 7; check the device plugin",
    ),
    Story(
        "a pod was preempted, and no node has room for the next one",
        job("Restarting", failure={"pod": POD, "reason": "Preempted", "message": "PreemptionByScheduler"}),
        (scheduled(f"5 Insufficient {GPU}"),),
        Blocker.INSUFFICIENT_GPUS,
        f"{POD} fits no node: {GPU} is used up",
    ),
    Story(
        "a node was lost, and the next pods start",
        job(
            "Restarting",
            failure={"pod": POD, "reason": "NodeLost", "node": "gpu-1", "message": "nothing is heard of node gpu-1"},
        ),
        (),
        Blocker.NODE_LOST,
        f"{POD} on node gpu-1 failed: nothing is heard of node gpu-1",
    ),
    Story(
        "the launchers cannot reach pod 1",
        job("Running", ("LostPeers", "nothing is heard of job-trainer-0-00001")),
        (),
        Blocker.PEERS_LOST,
        "nothing is heard of job-trainer-0-00001",
    ),
    Story(
        "the job's own Secret was deleted",
        restarting("SecretLost", "Secret job-x is gone, and pods that run hold a value that no new pod gets"),
        (),
        Blocker.SECRET_LOST,
        f"{POD} failed: Secret job-x is gone, and pods that run hold a value that no new pod gets",
    ),
    Story(
        "the reward's service is away",
        restarting(
            "RankFailed",
            "reward judge failed (Away: http://judge/ was away for more than 600 s "
            "(unavailableTimeoutSeconds): HTTP 503); the run is tried again",
            rank=0,
        ),
        (),
        Blocker.REWARD_AWAY,
        f"rank 0 of {POD} failed: reward judge failed (Away: http://judge/ was away for more than 600 s "
        "(unavailableTimeoutSeconds): HTTP 503); the run is tried again",
    ),
    Story(
        "no engine gets ready",
        restarting(
            "RankFailed", "no engine is ready after 1800 s: http://job-rollout-0-00000:8000 does not answer", rank=0
        ),
        (),
        Blocker.ENGINE_NOT_READY,
        f"rank 0 of {POD} failed: no engine is ready after 1800 s: http://job-rollout-0-00000:8000 does not answer",
    ),
    Story(
        "an engine ends again and again beside a gang that runs",
        job("Running", ("CrashLoopBackOff", "x")),
        (
            pod(
                0,
                role="rollout",
                waiting={"reason": "CrashLoopBackOff", "message": "back-off 5m0s"},
                node="gpu-2",
                container={"lastState": {"terminated": _ENGINE_END}},
            ),
        ),
        Blocker.ENGINE_NOT_READY,
        "engine job-rollout-0-00000 ends again and again: ValueError: No available memory for the cache blocks",
    ),
    Story(
        "an engine that has ended again and again is starting once more",
        job("Running", ("AllPodsRun", "every trainer pod runs")),
        (
            pod(
                0,
                condition("Ready", "False", "ContainersNotReady"),
                role="rollout",
                node="gpu-2",
                phase="Running",
                container={"state": {"running": {}}, "restartCount": 4, "lastState": {"terminated": _ENGINE_END}},
            ),
        ),
        Blocker.ENGINE_NOT_READY,
        "engine 0 has ended 4 times: ValueError: No available memory for the cache blocks",
    ),
    Story(
        "an engine in a trainer pod ends again and again",
        job("Running", ("EngineEnds", "engine 3 has ended 2 times")),
        (),
        Blocker.ENGINE_NOT_READY,
        "engine 3 has ended 2 times",
    ),
    Story(
        "an engine is still loading its model",
        job("Running", ("AllPodsRun", "every trainer pod runs")),
        (pod(0, condition("Ready", "False", "ContainersNotReady"), role="rollout", node="gpu-2", phase="Running"),),
        Blocker.ENGINE_NOT_READY,
        "engine job-rollout-0-00000 has not generated a token yet",
    ),
    Story(
        "a restart waits for its delay",
        job("Restarting", ("BackingOff", "starts again at 2030-01-01T00:31:00Z")),
        (),
        Blocker.BACKING_OFF,
        "the run starts again at 2030-01-01T00:31:00Z",
    ),
    # --- the end ---
    Story(
        "the model check has refused the model",
        rejected("/models/x/config.json cannot be read: it is not there; spec.model.source needs it"),
        (),
        Blocker.MODEL_REFUSED,
        "/models/x/config.json cannot be read: it is not there; spec.model.source needs it",
    ),
    Story(
        "no checkpoint is left that is good",
        rejected(
            "checkpoint.resumeFrom first names /runs/first, where there is no good checkpoint: step 100: manifest.json is "
            "not the one that COMPLETE was written for"
        ),
        (),
        Blocker.CHECKPOINT_DAMAGED,
        "checkpoint.resumeFrom first names /runs/first, where there is no good checkpoint: step 100: manifest.json is not the "
        "one that COMPLETE was written for",
    ),
    Story(
        "the volume is full",
        rejected(
            "saving step 40 in /runs/job failed: [Errno 28] No space left on device; the volume is "
            "full; free space on it, or make it larger"
        ),
        (),
        Blocker.DISK_FULL,
        "saving step 40 in /runs/job failed: [Errno 28] No space left on device; the volume is full; free space on it, or make "
        "it larger",
    ),
    Story(
        "the folder belongs to another job",
        rejected(
            "/runs/job belongs to job job (uid a), not to job job (uid b), and two runs in one folder would destroy each "
            "other's checkpoints"
        ),
        (),
        Blocker.RUN_FOLDER_TAKEN,
        "/runs/job belongs to job job (uid a), not to job job (uid b), and two runs in one folder would destroy each other's "
        "checkpoints",
    ),
    Story(
        "the pods may not write to the volume",
        rejected(
            "opening the run folder /runs/job failed: [Errno 13] Permission denied; make the folder writable for the user "
            "that the pods run as"
        ),
        (),
        Blocker.VOLUME_UNWRITABLE,
        "opening the run folder /runs/job failed: [Errno 13] Permission denied; make the folder writable for the user that the "
        "pods run as",
    ),
    Story(
        "a data file is missing",
        rejected("there is no file or folder /claims/d/chats.jsonl, which data source pvc://d/chats.jsonl names"),
        (),
        Blocker.DATA_REFUSED,
        "there is no file or folder /claims/d/chats.jsonl, which data source pvc://d/chats.jsonl names",
    ),
    Story(
        "a reward cannot start",
        rejected("reward judge cannot start (Refused): it is no http:// or https:// URL"),
        (),
        Blocker.REWARD_FAILED,
        "reward judge cannot start (Refused): it is no http:// or https:// URL",
    ),
    Story(
        "a job cannot work for a reason without a rule",
        rejected("adapters are written in float32; leave out --dtype"),
        (),
        Blocker.CONFIGURATION_REFUSED,
        "adapters are written in float32; leave out --dtype",
    ),
    Story(
        "the restarts of a job are spent",
        failed_job(
            "BackoffLimitExceeded",
            "RankFailed in pod 0",
            {"pod": POD, "reason": "RankFailed", "message": "KeyError: 'x'", "rank": 0},
            restarts={"sinceCheckpoint": 6},
        ),
        (),
        Blocker.BACKOFF_EXHAUSTED,
        f"rank 0 of {POD} failed: KeyError: 'x'; gave up after 6 restarts without a new checkpoint",
    ),
    Story(
        "the job was active for longer than it may",
        failed_job("DeadlineExceeded", "the job was active for longer than lifecycle.activeDeadlineSeconds 3600", None),
        (),
        Blocker.DEADLINE_EXCEEDED,
        "the job was active for longer than lifecycle.activeDeadlineSeconds 3600",
    ),
    # --- several at once ---
    Story(
        "a wrong image is said before GPUs that are in use",
        job(),
        (
            pod(0, unschedulable(f"0/5 nodes are available: 5 Insufficient {GPU}.")),
            pod(
                1,
                waiting={
                    "reason": "ImagePullBackOff",
                    "message": 'Back-off pulling image "x:1": ErrImagePull: not found',
                },
                node="gpu-1",
            ),
        ),
        Blocker.IMAGE_MISSING,
        "there is no image x:1",
    ),
    Story(
        "a queue's reason is said before pods that start",
        job(),
        (_CREATING, pod(1, gated(), labels={"kueue.x-k8s.io/queue-name": "q"})),
        Blocker.QUEUE_PENDING,
        "queue q has not admitted the job",
    ),
)
