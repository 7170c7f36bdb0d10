"""Jobs within and beyond one set of limits; planner and API server must both tell them apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moejob_api.profiles.fields import PROFILED_FIELDS

ALLOWED: dict[str, Any] = {
    "serviceAccounts": ["trainer"],
    "images": ["registry.example.com/ml/*", "registry.example.com/other/trainer:1"],
    "secrets": ["hugging-face", "team-*"],
    "configMaps": ["nccl"],
    "claims": ["models", "team-*"],
    "storageClasses": ["shared"],
    "priorityClasses": ["training"],
    "runtimeClasses": ["nvidia"],
    "schedulers": ["volcano"],
    "queues": ["team"],
    "networks": ["rdma-*", "net/rdma"],
    "tolerations": ["nvidia.com/gpu", "team.example.com/*"],
    "extendedResources": ["nvidia.com/gpu", "rdma/*"],
    "nodeSelectors": ["pool=training", "topology.kubernetes.io/zone=*"],
    "labels": ["example.com/*", "kueue.x-k8s.io/queue-name=team"],
    # A reserved key that is named whole is allowed.
    "hostPaths": ["/home/kubernetes/bin/*", "/dev/infiniband"],
    "privileges": ["hostNetwork", "capabilities/IPC_LOCK"],
    "annotations": ["example.com/*", "k8s.v1.cni.cncf.io/networks=*", "scheduling.volcano.sh/queue-name=*"],
}


@dataclass(frozen=True)
class LimitCase:
    """Sections for builders.spec; beyond the limits, the field that is refused and a piece of what is said of it."""

    id: str
    sections: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    says: str = ""

    def split_by_profile(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a profile can give of the sections, and what only a job can."""
        profile: dict[str, Any] = {}
        job: dict[str, Any] = {}
        for section, fields in self.sections.items():
            for name, value in fields.items():
                holder = profile if name in PROFILED_FIELDS.get(section, ()) else job
                holder.setdefault(section, {})[name] = value
        return profile, job


def _pods(case: str, path: str = "", says: str = "", **resources: Any) -> LimitCase:
    return LimitCase(case, {"resources": resources}, path and f"spec.resources.{path}", says)


def _template(case: str, path: str = "", says: str = "", metadata: Any = None, **spec: Any) -> LimitCase:
    """Show the same for a template of trainers; path is below it."""
    template = {"metadata": metadata} if metadata is not None else {"spec": spec}
    where = path and f"spec.podTemplate.trainer.{path}"
    return LimitCase(f"template: {case}", {"podTemplate": {"trainer": template}}, where, says)


def _beside(**container: Any) -> list[dict[str, Any]]:
    return [{"name": "beside", "image": "registry.example.com/ml/beside:1", **container}]


def _volume(**source: Any) -> list[dict[str, Any]]:
    return [{"name": "extra", **source}]


def _nodes(operator: str, key: str = "pool", *values: str) -> dict[str, Any]:
    expression: dict[str, Any] = {"key": key, "operator": operator, **({"values": list(values)} if values else {})}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _preferred_nodes(value: str) -> dict[str, Any]:
    preference = {"matchExpressions": [{"key": "pool", "operator": "In", "values": [value]}]}
    preferred = [{"weight": 1, "preference": preference}]
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _ephemeral(storage_class: str) -> dict[str, Any]:
    amounts = {"requests": {"storage": "1Gi"}}
    claim = {"accessModes": ["ReadWriteOnce"], "storageClassName": storage_class, "resources": amounts}
    return {"volumeClaimTemplate": {"spec": claim}}


def _variable(**source: Any) -> list[dict[str, Any]]:
    return [{"name": "TOKEN", "value": "1"}, {"name": "OTHER", **source}]


_KEY = {"key": "token"}
_NETWORKS = "k8s.v1.cni.cncf.io/networks"

WITHIN: tuple[LimitCase, ...] = (
    LimitCase("a job that names nothing"),
    _pods("service account", serviceAccount="trainer"),
    _pods("image by its beginning", image="registry.example.com/ml/trainer:2"),
    _pods("image by name", rolloutImage="registry.example.com/other/trainer:1"),
    _pods("Secret of a variable", env=_variable(secret={"name": "hugging-face", **_KEY})),
    _pods("Secret read whole", envFrom=[{"secret": "team-all"}]),
    _pods("Secret of a registry", imagePullSecrets=["team-registry"]),
    _pods("ConfigMap", env=_variable(configMap={"name": "nccl", **_KEY}), envFrom=[{"configMap": "nccl"}]),
    LimitCase(
        "claim",
        {
            "storage": {"size": None, "claimName": "team-a"},
            "model": {"source": "pvc://models/a/b", "config": "pvc://team-a"},
        },
    ),
    LimitCase("claim to go on from", {"checkpoint": {"resumeFrom": "pvc://team-a/run"}}),
    LimitCase("run beside it on the claim", {"checkpoint": {"resumeFrom": "other"}}),
    LimitCase("storage class", {"storage": {"storageClass": "shared"}}),
    _pods("priority class", priorityClassName="training"),
    _pods("runtime class", runtimeClassName="nvidia"),
    _pods("scheduler", schedulerName="volcano"),
    LimitCase("queue", {"lifecycle": {"queue": "team"}}),
    _pods("queue by a label", labels={"kueue.x-k8s.io/queue-name": "team"}),
    _pods("networks", rdma={"resource": "rdma/hca", "networks": "rdma-0, rdma-1@eth1,net/rdma"}),
    _pods("networks by an annotation", annotations={_NETWORKS: "rdma-0"}),
    _pods("tolerations", tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}]),
    _pods("GPUs and cards", gpuResource="nvidia.com/gpu", rdma={"resource": "rdma/ib"}),
    _pods("no GPUs", accelerator="CPU", gpuResource="example.com/phone"),
    _pods("node selectors", nodeSelector={"pool": "training", "topology.kubernetes.io/zone": "a"}),
    _pods("labels", labels={"example.com/a": "b"}, annotations={"example.com/a": "b c"}),
    _template("labels", metadata={"labels": {"example.com/a": "b"}, "annotations": {"example.com/a": "b c"}}),
    _template(
        "a sidecar with all that is allowed",
        containers=_beside(
            env=[{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}}],
            envFrom=[{"configMapRef": {"name": "nccl"}}, {"secretRef": {"name": "team-all"}}],
            resources={"limits": {"rdma/hca": 1, "cpu": "1", "hugepages-2Mi": "64Mi"}},
            securityContext={"capabilities": {"add": ["IPC_LOCK"]}},
        ),
        volumes=[
            *_volume(hostPath={"path": "/home/kubernetes/bin/gib"}),
            {"name": "secret", "secret": {"secretName": "team-files"}},
            {"name": "claim", "persistentVolumeClaim": {"claimName": "models"}},
            {"name": "scratch", "ephemeral": _ephemeral("shared")},
            {"name": "several", "projected": {"sources": [{"configMap": {"name": "nccl"}}]}},
        ],
        hostNetwork=True,
        runtimeClassName="nvidia",
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}],
        nodeSelector={"pool": "training"},
        affinity=_nodes("In", "pool", "training"),
    ),
    _template("any statement about an open key", affinity=_nodes("Exists", "topology.kubernetes.io/zone")),
)

BEYOND: tuple[LimitCase, ...] = (
    _pods("service account", "serviceAccount", "service account admin is beyond", serviceAccount="admin"),
    _pods("image", "image", "limits.images", image="elsewhere.example.com/ml/trainer:2"),
    _pods("image under a longer name", "image", "image registry", image="registry.example.com/other/trainer:12"),
    _pods("image of engines", "rolloutImage", "image evil", rolloutImage="evil"),
    _pods("Secret of a variable", "env[1]", "Secret admin", env=_variable(secret={"name": "admin", **_KEY})),
    _pods("Secret read whole", "envFrom[0]", "Secret tea", envFrom=[{"secret": "tea"}]),
    _pods("Secret of a registry", "imagePullSecrets[0]", "Secret others", imagePullSecrets=["others"]),
    _pods("ConfigMap of a variable", "env[1]", "ConfigMap b", env=_variable(configMap={"name": "b", **_KEY})),
    _pods("ConfigMap read whole", "envFrom[0]", "ConfigMap b", envFrom=[{"configMap": "b"}]),
    LimitCase("claim", {"storage": {"size": None, "claimName": "b"}}, "spec.storage.claimName", "claim b"),
    LimitCase("claim of a model", {"model": {"source": "pvc://b/team-a"}}, "spec.model.source", "claim b"),
    LimitCase(
        "claim of a model's config",
        {"model": {"source": "pvc://models/a", "config": "pvc://b/team-a"}},
        "spec.model.config",
        "claim b",
    ),
    LimitCase(
        "claim of data",
        {"data": {"eval": [{"source": "pvc://b/team-a", "format": "Chat"}]}},
        "spec.data.eval[0].source",
        "claim b",
    ),
    LimitCase(
        "claim to go on from", {"checkpoint": {"resumeFrom": "pvc://b"}}, "spec.checkpoint.resumeFrom", "claim b"
    ),
    LimitCase("storage class", {"storage": {"storageClass": "b"}}, "spec.storage.storageClass", "storage class b"),
    _pods("priority class", "priorityClassName", "priority class b", priorityClassName="b"),
    _pods("runtime class", "runtimeClassName", "runtime class b", runtimeClassName="b"),
    _pods("scheduler", "schedulerName", "scheduler b", schedulerName="b"),
    LimitCase("queue", {"lifecycle": {"queue": "b"}}, "spec.lifecycle.queue", "queue b"),
    _pods("queue by an annotation", "annotations", "queue b", annotations={"scheduling.volcano.sh/queue-name": "b"}),
    _pods("network", "rdma.networks", "network b", rdma={"resource": "rdma/hca", "networks": "rdma-0,b"}),
    _pods("network of another namespace", "annotations", "network b/rdma-0", annotations={_NETWORKS: "b/rdma-0"}),
    _pods("networks as JSON", "annotations", "network [{", annotations={_NETWORKS: '[{"name": "rdma-0"}]'}),
    _pods("toleration", "tolerations[0]", "toleration b", tolerations=[{"key": "b", "operator": "Exists"}]),
    _pods("toleration of all", "tolerations[0]", "toleration without a name", tolerations=[{"operator": "Exists"}]),
    _pods("GPU", "gpuResource", "extended resource example.com/phone", gpuResource="example.com/phone"),
    _pods("card", "rdma.resource", "extended resource example.com/phone", rdma={"resource": "example.com/phone"}),
    _pods("node selector", "nodeSelector", "node selector pool=system", nodeSelector={"pool": "system"}),
    _pods("label", "labels", "label app=web", labels={"app": "web"}),
    _pods("annotation", "annotations", "annotation b=c", annotations={"b": "c"}),
    _pods("reserved label", "labels", "the key moejob.dev/role is reserved", labels={"moejob.dev/role": "trainer"}),
    _pods(
        "reserved annotation",
        "annotations",
        "the key app.kubernetes.io/managed-by is reserved",
        annotations={"app.kubernetes.io/managed-by": "moejob"},
    ),
    _template("image", "spec", "image evil", containers=_beside(image="evil")),
    _template("image of an init container", "spec", "image evil", initContainers=_beside(image="evil")),
    _template(
        "Secret of a variable",
        "spec",
        "Secret b",
        containers=_beside(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "b", "key": "c"}}}]),
    ),
    _template("Secret read whole", "spec", "Secret b", containers=_beside(envFrom=[{"secretRef": {"name": "b"}}])),
    _template("Secret as files", "spec", "Secret b", volumes=_volume(secret={"secretName": "b"})),
    _template(
        "Secret among files", "spec", "Secret b", volumes=_volume(projected={"sources": [{"secret": {"name": "b"}}]})
    ),
    _template(
        "ConfigMap of a variable",
        "spec",
        "ConfigMap b",
        containers=_beside(env=[{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "b", "key": "c"}}}]),
    ),
    _template(
        "ConfigMap whole", "spec", "ConfigMap b", initContainers=_beside(envFrom=[{"configMapRef": {"name": "b"}}])
    ),
    _template("ConfigMap as files", "spec", "ConfigMap b", volumes=_volume(configMap={"name": "b"})),
    _template(
        "ConfigMap among files",
        "spec",
        "ConfigMap b",
        volumes=_volume(projected={"sources": [{"configMap": {"name": "b"}}]}),
    ),
    _template("claim", "spec", "claim b", volumes=_volume(persistentVolumeClaim={"claimName": "b"})),
    _template("storage class", "spec", "storage class b", volumes=_volume(ephemeral=_ephemeral("b"))),
    _template("runtime class", "spec", "runtime class b", runtimeClassName="b"),
    _template("toleration", "spec", "toleration b", tolerations=[{"key": "b", "operator": "Exists"}]),
    _template("toleration of all", "spec", "toleration (every taint)", tolerations=[{"operator": "Exists"}]),
    _template(
        "device of a sidecar",
        "spec",
        "extended resource example.com/phone",
        containers=_beside(resources={"limits": {"example.com/phone": 1}}),
    ),
    _template(
        "device of the trainer",
        "spec",
        "extended resource example.com/phone",
        containers=[{"name": "trainer", "resources": {"requests": {"example.com/phone": 1}}}],
    ),
    _template(
        "all GPUs of a node",
        "spec",
        "extended resource NVIDIA_VISIBLE_DEVICES",
        containers=_beside(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
    ),
    _template("node selector", "spec", "node selector pool=system", nodeSelector={"pool": "system"}),
    _template("node affinity", "spec", "node selector pool=system", affinity=_nodes("In", "pool", "system")),
    _template("nodes that are preferred", "spec", "node selector pool=system", affinity=_preferred_nodes("system")),
    _template("nodes without a label", "spec", "node selector pool=!DoesNotExist", affinity=_nodes("DoesNotExist")),
    _template("nodes of other labels", "spec", "pool=!NotIn", affinity=_nodes("NotIn", "pool", "training")),
    _template("path of a node", "spec", "path of a node /etc", volumes=_volume(hostPath={"path": "/etc"})),
    _template(
        "path below a folder", "spec", "/dev/infiniband/x", volumes=_volume(hostPath={"path": "/dev/infiniband/x"})
    ),
    _template("privileged", "spec", "privilege privileged", containers=_beside(securityContext={"privileged": True})),
    _template(
        "privileged trainer",
        "spec",
        "privilege privileged",
        containers=[{"name": "trainer", "securityContext": {"privileged": True}}],
    ),
    _template(
        "escalation",
        "spec",
        "privilege allowPrivilegeEscalation",
        initContainers=_beside(securityContext={"allowPrivilegeEscalation": True}),
    ),
    _template(
        "capability",
        "spec",
        "privilege capabilities/NET_ADMIN",
        containers=_beside(securityContext={"capabilities": {"add": ["IPC_LOCK", "NET_ADMIN"]}}),
    ),
    _template("root by number", "spec", "privilege root", containers=_beside(securityContext={"runAsUser": 0})),
    _template("root in all containers", "spec", "privilege root", securityContext={"runAsNonRoot": False}),
    _template(
        "no seccomp", "spec", "privilege seccomp/Unconfined", securityContext={"seccompProfile": {"type": "Unconfined"}}
    ),
    _template(
        "no AppArmor",
        "spec",
        "privilege appArmor/Unconfined",
        containers=_beside(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
    ),
    _template(
        "parameter of the kernel",
        "spec",
        "privilege sysctls/net.core.somaxconn",
        securityContext={"sysctls": [{"name": "net.core.somaxconn", "value": "1024"}]},
    ),
    _template(
        "port of the node",
        "spec",
        "privilege hostPort",
        containers=_beside(ports=[{"containerPort": 80, "hostPort": 80}]),
    ),
    _template("label", "metadata.labels", "label app=web", metadata={"labels": {"app": "web"}}),
    _template("annotation", "metadata.annotations", "annotation b=c", metadata={"annotations": {"b": "c"}}),
    _template(
        "reserved label",
        "metadata.labels",
        "the key batch.kubernetes.io/job-name is reserved",
        metadata={"labels": {"batch.kubernetes.io/job-name": "b"}},
    ),
)
# Of BEYOND, where an installation sets no limits.
REFUSED_BY_DEFAULT = {
    *("label", "reserved label", "reserved annotation", "queue by an annotation"),
    *("template: label", "template: reserved label", "template: path of a node", "template: path below a folder"),
    *("template: privileged", "template: privileged trainer", "template: escalation", "template: capability"),
    *("template: root by number", "template: root in all containers", "template: no seccomp", "template: no AppArmor"),
    *("template: parameter of the kernel", "template: port of the node"),
}

# The same limits where any label and annotation is allowed: what each limit is about stays bounded.
OPEN_KEYS: dict[str, Any] = {name: names for name, names in ALLOWED.items() if name != "annotations"} | {
    "labels": ["*"],
    "reserved": [],
}
_QUEUE_KEYS = (
    *("kueue.x-k8s.io/queue-name", "scheduling.volcano.sh/queue-name", "volcano.sh/queue-name"),
    *("yunikorn.apache.org/queue", "queue", "kai.scheduler/queue", "runai/queue", "project"),
)
_INTERFACES = '[{"interfaceName": "eth1", "network": "b"}]'
# Other words for what a limit forbids, as schedulers, network plugins and container runtimes read them.
WAYS_ROUND: tuple[LimitCase, ...] = (
    *(_pods(f"queue by the label {key}", "labels", "queue b", labels={key: "b"}) for key in _QUEUE_KEYS),
    *(_pods(f"queue by the annotation {key}", "annotations", "queue b", annotations={key: "b"}) for key in _QUEUE_KEYS),
    _pods("priority of Kueue", "labels", "priority class b", labels={"kueue.x-k8s.io/priority-class": "b"}),
    _pods("priority of KAI", "labels", "priority class b", labels={"priorityClassName": "b"}),
    _pods("network by default", "annotations", "network b", annotations={"v1.multus-cni.io/default-network": "b"}),
    _pods("networks of GKE", "annotations", "network [{", annotations={"networking.gke.io/interfaces": _INTERFACES}),
    _pods("network of GKE", "annotations", "network b", annotations={"networking.gke.io/default-interface": "b"}),
    _pods("nodes of KAI", "labels", "node selector kai.scheduler/node-pool=b", labels={"kai.scheduler/node-pool": "b"}),
    _pods("nodes of Run:ai", "labels", "node selector runai/node-pool=b", labels={"runai/node-pool": "b"}),
    _pods("part of a GPU", "annotations", "extended resource gpu-fraction", annotations={"gpu-fraction": "0.5"}),
    _pods("memory of a GPU", "annotations", "extended resource gpu-memory", annotations={"gpu-memory": "2000"}),
    _pods(
        "all GPUs of a node",
        "env[0]",
        "extended resource NVIDIA_VISIBLE_DEVICES",
        env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
    ),
    _template(
        "queue by a label", "metadata.labels", "queue b", metadata={"labels": {"kueue.x-k8s.io/queue-name": "b"}}
    ),
    _template(
        "priority of KAI", "metadata.labels", "priority class b", metadata={"labels": {"priorityClassName": "b"}}
    ),
    _template("networks", "metadata.annotations", "network b", metadata={"annotations": {_NETWORKS: "rdma-0,b"}}),
    _template(
        "nodes of KAI",
        "metadata.labels",
        "node selector kai.scheduler/node-pool=b",
        metadata={"labels": {"kai.scheduler/node-pool": "b"}},
    ),
    _template(
        "part of a GPU",
        "metadata.annotations",
        "extended resource gpu-fraction",
        metadata={"annotations": {"gpu-fraction": "0.5"}},
    ),
    LimitCase(
        "scheduler of a gang",
        {"lifecycle": {"gang": "Coscheduling"}},
        "spec.lifecycle.gang",
        "scheduler scheduler-plugins-scheduler",
    ),
)

_RESERVED_KEYS = (
    *("moejob.dev/role", "kueue.x-k8s.io/priority-class", "kueue.x-k8s.io/queue-name", "volcano.sh/queue-name"),
    *("scheduling.volcano.sh/queue-name", "scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group"),
    *("kubernetes.io/egress-bandwidth", "batch.kubernetes.io/job-name", "app.kubernetes.io/name", "cdi.k8s.io/gpus"),
    *("container.apparmor.security.beta.kubernetes.io/trainer", "io.kubernetes.cri-o.Devices", "k8s.io/any"),
    *(
        "training.kubeflow.org/job-name",
        "devices.gke.io/container.a",
        "devices.nri.io/pod",
        "devices.noderesource.dev/a",
    ),
    *("io.kubernetes.cri.untrusted-workload", "topology.kubernetes.io/zone", "danm.k8s.io/interfaces"),
)
# Keys that an installation without a limit refuses all the same.
RESERVED_BY_DEFAULT: tuple[LimitCase, ...] = tuple(
    _pods(f"{key} in {name}", name, f"{key} is reserved", **{name: {key: "b"}})
    for key in _RESERVED_KEYS
    for name in ("labels", "annotations")
    if not (name == "labels" and "/" not in key)
)
