"""The pods: GPUs, images, placement."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from moejob_api.job.base import (
    MOST_RANKS_OF_A_POD,
    ApiModel,
    GroupSize,
    LongText,
    ObjectName,
    QualifiedName,
    Quantity,
    Seconds,
    ShortText,
    TextMap,
)

# As many pods as may be replaced at once in a gang.
MOST_SPARES = 64


class Accelerator(StrEnum):
    """The device of ranks."""

    GPU = "GPU"
    CPU = "CPU"


class GpuType(StrEnum):
    """GPUs whose memory and speed are known."""

    A100 = "A100"
    H100 = "H100"
    H200 = "H200"
    B200 = "B200"
    GB200 = "GB200"


class QosClass(StrEnum):
    """The quality-of-service class that Kubernetes gives pods of the job by their requests and limits."""

    BURSTABLE = "Burstable"
    GUARANTEED = "Guaranteed"


class ImagePullPolicy(StrEnum):
    """`imagePullPolicy` of a container, as in Kubernetes."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class TolerationOperator(StrEnum):
    """`operator` of a toleration, as in Kubernetes: Exists accepts every value of the key."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """`effect` of a taint, as in Kubernetes: NoExecute also evicts pods that run."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(ApiModel):
    """A taint the pods accept, as in Kubernetes."""

    key: Annotated[QualifiedName | None, Field(description="Taint key. Absent: all, with operator Exists.")] = None
    operator: Annotated[TolerationOperator, Field(description="Exists or Equal.")] = TolerationOperator.EQUAL
    value: Annotated[str | None, Field(max_length=63, description="Taint value, for Equal.")] = None
    effect: Annotated[TaintEffect | None, Field(description="Taint effect. Absent: all.")] = None
    toleration_seconds: Annotated[
        Seconds | None, Field(description="Seconds a NoExecute taint is tolerated. Absent: for ever.")
    ] = None


class KeyReference(ApiModel):
    """One key of a Secret or ConfigMap."""

    name: Annotated[ObjectName, Field(description="Name of the object.")]
    key: Annotated[ShortText, Field(description="Key in it.")]
    optional: Annotated[bool, Field(description="Do without when it is missing.")] = False


EnvName = Annotated[str, Field(max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class EnvVar(ApiModel):
    """One environment variable; exactly one of value, secret and configMap is given."""

    name: Annotated[EnvName, Field(description="Name; those of moejob itself (MOEJOB_*) are refused.")]
    value: Annotated[str | None, Field(max_length=32_768, description="The value itself.")] = None
    secret: Annotated[KeyReference | None, Field(description="Taken from a Secret.")] = None
    config_map: Annotated[KeyReference | None, Field(description="Taken from a ConfigMap.")] = None


class EnvSource(ApiModel):
    """All keys of a Secret or ConfigMap; exactly one of the two is given."""

    secret: Annotated[ObjectName | None, Field(description="Name of a Secret.")] = None
    config_map: Annotated[ObjectName | None, Field(description="Name of a ConfigMap.")] = None


class Rdma(ApiModel):
    """Network cards for GPU-to-GPU traffic between nodes."""

    resource: Annotated[QualifiedName, Field(description="Extended resource of the cards, e.g. rdma/hca.")]
    count: Annotated[GroupSize, Field(description="Cards per pod.")] = 1
    networks: Annotated[LongText | None, Field(description="Value of the k8s.v1.cni.cncf.io/networks annotation.")] = (
        None
    )


class Resources(ApiModel):
    """The resources and placement of every pod of the job."""

    accelerator: Annotated[
        Accelerator,
        Field(description="CPU is for laptops and tests and never chosen by itself; ranks then count as GPUs."),
    ] = Accelerator.GPU
    gpus_per_node: Annotated[
        int, Field(ge=1, le=MOST_RANKS_OF_A_POD, description="GPUs of one node; one pod takes a whole node.")
    ] = 8
    spares: Annotated[
        int,
        Field(
            ge=0,
            le=MOST_SPARES,
            description="Further trainer pods that hold a node each, with imports done. One takes the place of a lost "
            "pod at once. `moejob run` starts none.",
        ),
    ] = 0
    gpu_resource: Annotated[QualifiedName, Field(description="Extended resource of the GPUs.")] = "nvidia.com/gpu"
    gpu_type: Annotated[
        GpuType | None,
        Field(
            description=(
                "Known GPU; its memory bounds the plan. Absent, like gpuMemoryGiB: nothing is refused for memory."
            )
        ),
    ] = None
    gpu_memory_gi_b: Annotated[
        int | None,
        Field(ge=1, le=4096, alias="gpuMemoryGiB", description="Memory of one GPU in GiB, instead of gpuType."),
    ] = None
    cpu: Annotated[
        Quantity | None, Field(description="CPU request of a pod, such as 96. Absent: the plan's, 4 cores for a GPU.")
    ] = None
    memory: Annotated[
        Quantity | None,
        Field(
            description="Memory request and limit of a pod, such as 1Ti. Absent: the plan's host memory is requested, "
            "without a limit."
        ),
    ] = None
    shared_memory: Annotated[
        Quantity | None,
        Field(description="Size of /dev/shm, such as 16Gi; it counts as memory. Absent: 2Gi for a GPU, 1Gi for a CPU."),
    ] = None
    qos_class: Annotated[
        QosClass,
        Field(
            description="Guaranteed: CPU and memory have limits, equal to the requests; the plan's include /dev/shm."
        ),
    ] = QosClass.BURSTABLE
    image: Annotated[LongText | None, Field(description="Trainer image. Absent: the operator's default.")] = None
    rollout_image: Annotated[
        LongText | None, Field(description="Image of separate rollout pods. Absent: the operator's default.")
    ] = None
    image_pull_policy: Annotated[ImagePullPolicy, Field(description="When images are pulled.")] = (
        ImagePullPolicy.IF_NOT_PRESENT
    )
    image_pull_secrets: Annotated[
        tuple[ObjectName, ...], Field(max_length=16, description="Secrets with registry credentials.")
    ] = ()
    node_selector: Annotated[TextMap, Field(max_length=64, description="Labels a node must have.")] = {}
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=64, description="Taints that are accepted.")] = ()
    env: Annotated[tuple[EnvVar, ...], Field(max_length=256, description="Environment variables of the trainer.")] = ()
    env_from: Annotated[
        tuple[EnvSource, ...], Field(max_length=32, description="Secrets and ConfigMaps read into the environment.")
    ] = ()
    labels: Annotated[TextMap, Field(max_length=64, description="Further labels of the pods.")] = {}
    annotations: Annotated[TextMap, Field(max_length=64, description="Further annotations of the pods.")] = {}
    scheduler_name: Annotated[ObjectName | None, Field(description="Scheduler. Absent: the cluster's default.")] = None
    priority_class_name: Annotated[ObjectName | None, Field(description="PriorityClass of the pods.")] = None
    runtime_class_name: Annotated[ObjectName | None, Field(description="RuntimeClass of the pods.")] = None
    service_account: Annotated[
        ObjectName | None, Field(description="ServiceAccount of the pods; its token is not mounted.")
    ] = None
    rdma: Annotated[
        Rdma | None,
        Field(
            description="Network cards for traffic between nodes, whose container runtime must let processes pin "
            "memory (LimitMEMLOCK=infinity)."
        ),
    ] = None
    topology_key: Annotated[
        QualifiedName | None,
        Field(description="Node label of a network domain; pods that talk most are kept inside one domain."),
    ] = None
