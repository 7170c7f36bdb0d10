"""The obstacles of a job, as a closed list, and for each what follows by itself and what a person can do.

`{job}`, `{namespace}` and `{object}` stand in the texts for the job, its namespace and what a finding names: a claim,
an image, a taint, a resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType


class Blocker(StrEnum):
    """An obstacle: the word in `kubectl get -o wide` and in the label of the metric."""

    # The job itself
    OPERATOR_ABSENT = "OperatorAbsent"
    JOB_REFUSED = "JobRefused"
    PROFILE_MISSING = "ProfileMissing"
    JOB_ENDING = "JobEnding"
    JOB_EXPIRING = "JobExpiring"
    SUSPENDED = "Suspended"
    # Creation of objects
    QUOTA_EXCEEDED = "QuotaExceeded"
    NAME_TAKEN = "NameTaken"
    NAMESPACE_ENDING = "NamespaceEnding"
    SERVICE_ACCOUNT_MISSING = "ServiceAccountMissing"
    PRIORITY_CLASS_MISSING = "PriorityClassMissing"
    RUNTIME_CLASS_MISSING = "RuntimeClassMissing"
    POD_SECURITY = "PodSecurity"
    LIMIT_RANGE = "LimitRange"
    ADMISSION_DENIED = "AdmissionDenied"
    ADMISSION_WEBHOOK_DOWN = "AdmissionWebhookDown"
    CREATION_REFUSED = "CreationRefused"
    # Queues and gangs
    GANG_SCHEDULER_MISSING = "GangSchedulerMissing"
    GANG_INCOMPLETE = "GangIncomplete"
    QUEUE_MISSING = "QueueMissing"
    QUEUE_TOO_SMALL = "QueueTooSmall"
    QUEUE_INACTIVE = "QueueInactive"
    QUEUE_QUOTA = "QueueQuota"
    QUEUE_PENDING = "QueuePending"
    QUEUE_CHECK = "QueueCheck"
    QUEUE_EVICTED = "QueueEvicted"
    QUEUE_DEACTIVATED = "QueueDeactivated"
    # Nodes
    SCHEDULER_ABSENT = "SchedulerAbsent"
    NODE_SELECTOR = "NodeSelector"
    TAINT = "Taint"
    RESOURCE_UNKNOWN = "ResourceUnknown"
    INSUFFICIENT_GPUS = "InsufficientGpus"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    INSUFFICIENT_CPU = "InsufficientCpu"
    INSUFFICIENT_RESOURCE = "InsufficientResource"
    POD_AFFINITY = "PodAffinity"
    TOPOLOGY_SPREAD = "TopologySpread"
    NODES_UNAVAILABLE = "NodesUnavailable"
    NO_NODES = "NoNodes"
    UNSCHEDULABLE = "Unschedulable"
    # Volumes
    STORAGE_CLASS_MISSING = "StorageClassMissing"
    CLAIM_MISSING = "ClaimMissing"
    CLAIM_LOST = "ClaimLost"
    CLAIM_ENDING = "ClaimEnding"
    CLAIM_UNBOUND = "ClaimUnbound"
    PROVISIONING_FAILED = "ProvisioningFailed"
    VOLUME_ELSEWHERE = "VolumeElsewhere"
    VOLUME_ATTACHED = "VolumeAttached"
    MOUNT_FAILED = "MountFailed"
    # Containers
    IMAGE_NAME = "ImageName"
    IMAGE_MISSING = "ImageMissing"
    IMAGE_PULL_DENIED = "ImagePullDenied"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    SECRET_MISSING = "SecretMissing"
    CONFIG_MAP_MISSING = "ConfigMapMissing"
    CONTAINER_REFUSED = "ContainerRefused"
    SANDBOX_FAILED = "SandboxFailed"
    STARTING = "Starting"
    IMAGE_PULLING = "ImagePulling"
    # Pods that go
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"
    POD_ENDING = "PodEnding"
    POD_STUCK = "PodStuck"
    DELETION_REFUSED = "DeletionRefused"
    # The run
    BACKING_OFF = "BackingOff"
    RANKS_HUNG = "RanksHung"
    RANK_FAILED = "RankFailed"
    POD_FAILED = "PodFailed"
    PEERS_LOST = "PeersLost"
    SECRET_LOST = "SecretLost"
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    GPU_OUT_OF_MEMORY = "GpuOutOfMemory"
    GPU_MISSING = "GpuMissing"
    SHARED_MEMORY_FULL = "SharedMemoryFull"
    DISK_FULL = "DiskFull"
    VOLUME_UNWRITABLE = "VolumeUnwritable"
    RUN_FOLDER_TAKEN = "RunFolderTaken"
    CHECKPOINT_DAMAGED = "CheckpointDamaged"
    MODEL_REFUSED = "ModelRefused"
    DATA_REFUSED = "DataRefused"
    HUB_REFUSED = "HubRefused"
    HUB_AWAY = "HubAway"
    REWARD_AWAY = "RewardAway"
    REWARD_FAILED = "RewardFailed"
    ENGINE_NOT_READY = "EngineNotReady"
    ROUTER_COLLAPSED = "RouterCollapsed"
    NOTHING_LEARNED = "NothingLearned"
    CONFIGURATION_REFUSED = "ConfigurationRefused"
    BACKOFF_EXHAUSTED = "BackoffExhausted"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


class Urgency(IntEnum):
    """The order of findings: those that no wait ends come first."""

    NEEDS_CHANGE = 0
    SHORTAGE = 1
    UNDERWAY = 2


@dataclass(frozen=True, slots=True)
class Advice:
    """The texts about an obstacle."""

    urgency: Urgency
    next: str
    fix: str


_RETRIED = "the operator tries again every 30 s"
_SCHEDULED = "the scheduler places the pods as soon as a node fits"
_KUBELET = "the kubelet tries again, at most every 5 minutes"
_RESTARTED = "the operator starts the run again from its last checkpoint, within lifecycle.backoffLimit"
_NOTHING = "no action is needed"
_CHANGE, _SHORT, _UNDERWAY = Urgency.NEEDS_CHANGE, Urgency.SHORTAGE, Urgency.UNDERWAY

ADVICE: Mapping[Blocker, Advice] = MappingProxyType(
    {
        Blocker.OPERATOR_ABSENT: Advice(
            _CHANGE,
            "nothing follows until an operator runs that serves namespace {namespace}",
            "install the chart, or add {namespace} to its `namespaces`; `kubectl get pods -A -l "
            "app.kubernetes.io/component=operator` shows whether it runs",
        ),
        Blocker.JOB_REFUSED: Advice(
            _CHANGE,
            "the operator creates no pod for it",
            "create the job again with the field that the message names corrected; `moejob plan` checks it before",
        ),
        Blocker.PROFILE_MISSING: Advice(
            _CHANGE,
            "the operator looks for the profile every 30 seconds, and accepts the job when it is there",
            "create the profile that the message names; `kubectl get moetrainingprofiles,clustermoetrainingprofiles -n "
            "{namespace}` lists those that exist, and to name another one takes another job",
        ),
        Blocker.JOB_ENDING: Advice(
            _UNDERWAY,
            "the job is gone when its pods have ended",
            "wait; where a finalizer is named, its controller has to remove it",
        ),
        Blocker.JOB_EXPIRING: Advice(
            _UNDERWAY,
            "the operator deletes the job, its pods and its own volume at that time",
            "copy the export before, or raise lifecycle.ttlSecondsAfterFinished",
        ),
        Blocker.SUSPENDED: Advice(
            _CHANGE,
            "the volume and its checkpoints stay; no pod runs",
            "`kubectl patch moetrainingjob {job} -n {namespace} --type merge -p "
            '\'{{"spec":{{"lifecycle":{{"suspend":false}}}}}}\'` resumes it',
        ),
        Blocker.QUOTA_EXCEEDED: Advice(
            _SHORT,
            _RETRIED,
            "wait for other pods of {namespace} to end, raise the ResourceQuota {object}, or ask for less",
        ),
        Blocker.NAME_TAKEN: Advice(
            _CHANGE, _RETRIED, "delete the object that the message names, or create the job under another name"
        ),
        Blocker.NAMESPACE_ENDING: Advice(
            _CHANGE, "the job ends with its namespace", "create the job in another namespace"
        ),
        Blocker.SERVICE_ACCOUNT_MISSING: Advice(
            _CHANGE,
            _RETRIED,
            "create the ServiceAccount {object} in {namespace}, or the job again with another resources.serviceAccount",
        ),
        Blocker.PRIORITY_CLASS_MISSING: Advice(
            _CHANGE,
            _RETRIED,
            "create the PriorityClass {object}, or the job again with another resources.priorityClassName",
        ),
        Blocker.RUNTIME_CLASS_MISSING: Advice(
            _CHANGE,
            _RETRIED,
            "create the RuntimeClass {object}, or the job again with another resources.runtimeClassName",
        ),
        Blocker.POD_SECURITY: Advice(
            _CHANGE,
            _RETRIED,
            "create the job again without what the message names, or label the namespace with a weaker "
            "pod-security.kubernetes.io/enforce",
        ),
        Blocker.LIMIT_RANGE: Advice(
            _CHANGE,
            _RETRIED,
            "create the job again with resources.cpu and resources.memory within the LimitRange of {namespace}",
        ),
        Blocker.ADMISSION_DENIED: Advice(
            _CHANGE, _RETRIED, "change what the policy {object} names, or ask the person who set it"
        ),
        Blocker.ADMISSION_WEBHOOK_DOWN: Advice(
            _SHORT,
            _RETRIED,
            "bring the service of webhook {object} up again, or remove its webhook configuration",
        ),
        Blocker.CREATION_REFUSED: Advice(_CHANGE, _RETRIED, "change what the API server's message names"),
        Blocker.GANG_SCHEDULER_MISSING: Advice(
            _CHANGE, _RETRIED, "install that scheduler, or create the job again with another lifecycle.gang"
        ),
        Blocker.GANG_INCOMPLETE: Advice(
            _SHORT,
            "the scheduler starts all pods at once when every one of them fits",
            "wait for GPUs, add nodes, or choose a layout of fewer GPUs: `moejob plan --auto --gpus N`",
        ),
        Blocker.QUEUE_MISSING: Advice(
            _CHANGE,
            "Kueue admits the job once the queue exists",
            "create the LocalQueue and its ClusterQueue, or create the job again with another lifecycle.queue",
        ),
        Blocker.QUEUE_TOO_SMALL: Advice(
            _CHANGE,
            "Kueue never admits the job",
            "choose a layout of fewer GPUs (`moejob plan --auto --gpus N`), or raise the quota of the ClusterQueue",
        ),
        Blocker.QUEUE_INACTIVE: Advice(
            _SHORT,
            "Kueue admits the job when the queue is active again",
            "`kubectl describe clusterqueue` says why it is inactive: a missing flavor, or stopPolicy",
        ),
        Blocker.QUEUE_QUOTA: Advice(
            _SHORT,
            "Kueue admits the job when others of the queue end",
            "wait, or raise the quota of the ClusterQueue; a higher resources.priorityClassName goes before others",
        ),
        Blocker.QUEUE_PENDING: Advice(
            _SHORT,
            "Kueue removes the gate of the pods when it admits the job",
            "`kubectl describe workload -n {namespace}` has Kueue's reason",
        ),
        Blocker.QUEUE_CHECK: Advice(
            _SHORT,
            "Kueue starts the pods when the admission check {object} is ready",
            "`kubectl describe admissioncheck {object}`; a provisioning check waits for new nodes",
        ),
        Blocker.QUEUE_EVICTED: Advice(
            _SHORT,
            "the run resumes from its last checkpoint when Kueue admits it again",
            "wait, or ask for quota that others cannot reclaim; a higher resources.priorityClassName goes first",
        ),
        Blocker.QUEUE_DEACTIVATED: Advice(
            _CHANGE,
            "Kueue admits the job no more",
            '`kubectl patch workload {object} -n {namespace} --type merge -p \'{{"spec":{{"active":true}}}}\'`',
        ),
        Blocker.SCHEDULER_ABSENT: Advice(
            _CHANGE,
            "nothing follows until a scheduler of that name runs",
            "start the scheduler {object}, or create the job again with another resources.schedulerName",
        ),
        Blocker.NODE_SELECTOR: Advice(
            _CHANGE,
            _SCHEDULED,
            "label nodes to match (`kubectl get nodes --show-labels`), or create the job again with another "
            "resources.nodeSelector",
        ),
        Blocker.TAINT: Advice(
            _CHANGE, _SCHEDULED, "create the job again with the taint {object} in resources.tolerations"
        ),
        Blocker.RESOURCE_UNKNOWN: Advice(
            _CHANGE,
            _SCHEDULED,
            "install the plugin that offers {object}, or create the job again with another resources.gpuResource",
        ),
        Blocker.INSUFFICIENT_GPUS: Advice(
            _SHORT,
            _SCHEDULED,
            "wait for GPUs, add nodes, or choose a layout of fewer GPUs: `moejob plan --auto --gpus N`",
        ),
        Blocker.INSUFFICIENT_MEMORY: Advice(
            _SHORT, _SCHEDULED, "add nodes with more, or create the job again with a lower resources.memory"
        ),
        Blocker.INSUFFICIENT_CPU: Advice(
            _SHORT, _SCHEDULED, "add nodes, or create the job again with a lower resources.cpu"
        ),
        Blocker.INSUFFICIENT_RESOURCE: Advice(
            _SHORT, _SCHEDULED, "add nodes that offer more {object}, or create the job again with less of it"
        ),
        Blocker.POD_AFFINITY: Advice(
            _SHORT,
            _SCHEDULED,
            "free one domain of resources.topologyKey for the whole group, or create the job again without it",
        ),
        Blocker.TOPOLOGY_SPREAD: Advice(_SHORT, _SCHEDULED, "free nodes in the other domains, or add nodes there"),
        Blocker.NODES_UNAVAILABLE: Advice(
            _SHORT, _SCHEDULED, "`kubectl uncordon` nodes that are cordoned; look after nodes that are not ready"
        ),
        Blocker.NO_NODES: Advice(_SHORT, _SCHEDULED, "add nodes with GPUs to the cluster"),
        Blocker.UNSCHEDULABLE: Advice(
            _SHORT,
            _SCHEDULED,
            "add nodes, or create the job again with less for each pod: `moejob plan` prints what it asks for",
        ),
        Blocker.STORAGE_CLASS_MISSING: Advice(
            _CHANGE,
            "the claim is bound once its storage class exists",
            "create the job again with a storage.storageClass of `kubectl get storageclass`, or mark one as default",
        ),
        Blocker.CLAIM_MISSING: Advice(
            _CHANGE, _SCHEDULED, "create the claim {object} in {namespace}, or the job again with another claim"
        ),
        Blocker.CLAIM_LOST: Advice(
            _CHANGE, "nothing follows: its volume is gone", "restore the volume, or create the job on another claim"
        ),
        Blocker.CLAIM_ENDING: Advice(
            _CHANGE,
            "the claim ends when no pod mounts it any more",
            "create the job again with another claim; one that is being deleted cannot be kept",
        ),
        Blocker.CLAIM_UNBOUND: Advice(
            _SHORT,
            "the pods start when the claim is bound",
            "`kubectl describe pvc {object} -n {namespace}`; several nodes need a storage class with ReadWriteMany",
        ),
        Blocker.PROVISIONING_FAILED: Advice(
            _SHORT, "the provisioner tries again", "correct what it names: size, access modes, quota of the storage"
        ),
        Blocker.VOLUME_ELSEWHERE: Advice(
            _CHANGE,
            _SCHEDULED,
            "use a storage class whose volumes all nodes reach, or let pods select nodes of the volume's zone",
        ),
        Blocker.VOLUME_ATTACHED: Advice(
            _SHORT,
            "the pod starts when the other node has given the volume up",
            "use a ReadWriteMany storage class; where the other node is lost, delete its VolumeAttachment",
        ),
        Blocker.MOUNT_FAILED: Advice(
            _SHORT, _KUBELET, "correct what the message names: server, path, Secret or rights"
        ),
        Blocker.IMAGE_NAME: Advice(
            _CHANGE, "the kubelet pulls no image of that name", "create the job again with another resources.image"
        ),
        Blocker.IMAGE_MISSING: Advice(
            _CHANGE, _KUBELET, "push the image {object}, or create the job again with another resources.image"
        ),
        Blocker.IMAGE_PULL_DENIED: Advice(
            _CHANGE,
            _KUBELET,
            "create the job again with a pull secret in resources.imagePullSecrets, or another resources.image",
        ),
        Blocker.IMAGE_PULL_FAILED: Advice(
            _SHORT, _KUBELET, "check that nodes reach the registry of {object}, and its certificate and rate limit"
        ),
        Blocker.SECRET_MISSING: Advice(
            _CHANGE,
            _KUBELET,
            "create the Secret {object} in {namespace}, or the job again with other resources.env",
        ),
        Blocker.CONFIG_MAP_MISSING: Advice(
            _CHANGE,
            _KUBELET,
            "create the ConfigMap {object} in {namespace}, or the job again with other resources.env",
        ),
        Blocker.CONTAINER_REFUSED: Advice(
            _CHANGE, _KUBELET, "correct what the message names: image, user, or the node's container runtime"
        ),
        Blocker.SANDBOX_FAILED: Advice(
            _SHORT, _KUBELET, "look after the node's network plugin and container runtime: `kubectl describe node`"
        ),
        Blocker.STARTING: Advice(_UNDERWAY, "the pods start", _NOTHING),
        Blocker.IMAGE_PULLING: Advice(
            _UNDERWAY,
            "the pod starts when its image is there",
            f"{_NOTHING}; an image of many GB takes minutes on a node that never had it",
        ),
        Blocker.PREEMPTED: Advice(
            _SHORT,
            "the run resumes from its last checkpoint when a node fits; it costs no budget",
            "create the next job with a higher resources.priorityClassName",
        ),
        Blocker.EVICTED: Advice(
            _SHORT,
            "the pod is replaced; it costs no budget",
            "look after the node's disk and memory; a job that sets resources.memory to what it uses goes last",
        ),
        Blocker.NODE_LOST: Advice(
            _SHORT,
            "the pods of the node are replaced on another one; it costs no budget",
            "look after node {object}: `kubectl describe node {object}`; delete it if it is gone for good",
        ),
        Blocker.POD_ENDING: Advice(
            _UNDERWAY, "the next pods start when these have saved and ended", "wait: a pod saves before it ends"
        ),
        Blocker.POD_STUCK: Advice(
            _SHORT,
            "the next pods start when the node confirms the end, or is known to be lost",
            "look after node {object}; if its machine is gone, `kubectl delete node {object}`",
        ),
        Blocker.DELETION_REFUSED: Advice(
            _CHANGE, _RETRIED, "let the operator delete pods: a policy, a finalizer or a webhook keeps it from that"
        ),
        Blocker.BACKING_OFF: Advice(_UNDERWAY, "the operator starts the run again then", _NOTHING),
        Blocker.RANKS_HUNG: Advice(
            _SHORT,
            _RESTARTED,
            "look at the GPU and the network of the rank that is named; raise lifecycle.progressDeadlineSeconds if one "
            "step takes longer",
        ),
        Blocker.RANK_FAILED: Advice(
            _SHORT, _RESTARTED, "`kubectl logs {object} -n {namespace}` has the traceback of the rank"
        ),
        Blocker.POD_FAILED: Advice(_SHORT, _RESTARTED, "`kubectl logs {object} -n {namespace}`, and `describe pod`"),
        Blocker.PEERS_LOST: Advice(
            _SHORT,
            "the operator replaces the silent pod when it knows what became of it, within 75 s",
            "look after the pod that is named, its node, and the network between both; a NetworkPolicy has to allow "
            "all ports between pods of one job",
        ),
        Blocker.SECRET_LOST: Advice(
            _SHORT, "all pods are replaced with a new Secret; it costs no budget", "find who deletes Secrets there"
        ),
        Blocker.HOST_OUT_OF_MEMORY: Advice(
            _CHANGE,
            _RESTARTED,
            "create the job again with more resources.memory; offloaded states and resources.sharedMemory count there",
        ),
        Blocker.GPU_OUT_OF_MEMORY: Advice(
            _CHANGE,
            _RESTARTED,
            "create the job again with training.recompute, a smaller training.microBatchSize, memory.offloadOptimizer, "
            "or a larger parallelism.expert or parallelism.pipeline",
        ),
        Blocker.GPU_MISSING: Advice(
            _SHORT, _RESTARTED, "look after the GPUs of node {object} (`nvidia-smi`, Xid errors), or drain it"
        ),
        Blocker.SHARED_MEMORY_FULL: Advice(
            _CHANGE, _RESTARTED, "create the job again with more resources.sharedMemory"
        ),
        Blocker.DISK_FULL: Advice(
            _CHANGE,
            _RESTARTED,
            "free space or enlarge the claim, then create the job again; a lower checkpoint.keep leaves more",
        ),
        Blocker.VOLUME_UNWRITABLE: Advice(
            _CHANGE, _RESTARTED, "make the folder writable for the group of the pods, then create the job again"
        ),
        Blocker.RUN_FOLDER_TAKEN: Advice(
            _CHANGE, _RESTARTED, "create the job under another name, or move the folder away"
        ),
        Blocker.CHECKPOINT_DAMAGED: Advice(
            _CHANGE, _RESTARTED, "name an earlier step in checkpoint.resumeFrom, or restore the folder from a copy"
        ),
        Blocker.MODEL_REFUSED: Advice(
            _CHANGE, _RESTARTED, "create the job again with what the message names corrected"
        ),
        Blocker.DATA_REFUSED: Advice(
            _CHANGE,
            _RESTARTED,
            "correct the data (`moejob data JOB.yaml` shows what the model sees), then create the job again",
        ),
        Blocker.HUB_REFUSED: Advice(
            _CHANGE,
            _RESTARTED,
            "accept the terms of the repository on the hub, or create the job again with HF_TOKEN in resources.env",
        ),
        Blocker.HUB_AWAY: Advice(_SHORT, _RESTARTED, "let the pods reach the hub, or name a folder on a volume"),
        Blocker.REWARD_AWAY: Advice(_SHORT, _RESTARTED, "bring the reward's service up again"),
        Blocker.REWARD_FAILED: Advice(
            _CHANGE,
            _RESTARTED,
            "correct the reward, then create the job again; grpo.rewardFailure DropGroup skips what it cannot score",
        ),
        Blocker.ENGINE_NOT_READY: Advice(
            _SHORT,
            "ranks wait for engines; the operator replaces an engine that ends",
            "`kubectl logs {object} -n {namespace}`, with `--previous` where it has ended, has the words of the engine",
        ),
        Blocker.ROUTER_COLLAPSED: Advice(
            _UNDERWAY,
            "the run continues with the experts that are left, and may learn little",
            "look at the load of experts with `moejob board`; stop the job, and continue from an earlier checkpoint "
            "with moe.balancing on, a larger moe.auxLossCoefficient or a smaller training.optimizer.learningRate",
        ),
        Blocker.NOTHING_LEARNED: Advice(
            _UNDERWAY,
            "the run makes its steps, and the model stays as it is",
            "read some answers with `moejob samples`; equal rewards: take prompts that the model gets right now and "
            "then, or a reward that gives a part of the points; answers that are cut off: raise grpo.maxNewTokens",
        ),
        Blocker.CONFIGURATION_REFUSED: Advice(
            _CHANGE, _RESTARTED, "change what the message names, then create the job again"
        ),
        Blocker.BACKOFF_EXHAUSTED: Advice(
            _CHANGE,
            "nothing follows: the job has failed",
            "repair what the last failure names, then create another job; condition Failed says how it resumes",
        ),
        Blocker.DEADLINE_EXCEEDED: Advice(
            _CHANGE,
            "nothing follows: the job has failed",
            "create another job with a longer lifecycle.activeDeadlineSeconds; condition Failed says how it resumes",
        ),
    }
)
