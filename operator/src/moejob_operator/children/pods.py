"""The pods: trainers, which form the gang, and separate rollout engines, which come and go."""

from __future__ import annotations

from typing import Any

from moejob_api.contract.engines import colocated_per_pod
from moejob_api.contract.pods import MANAGED_BY, HttpPath, Label, PodPath, PodPort, PodRole, TrainingLabel
from moejob_api.job import Spec
from moejob_api.job.resources import Accelerator
from moejob_operator.actions import Kind
from moejob_operator.children.attempt import Attempt, job_metadata
from moejob_operator.children.environment import environment_sources, environment_variables, ranks_per_pod
from moejob_operator.children.gangs import gang_marks
from moejob_operator.children.placement import pod_affinity, pod_tolerations
from moejob_operator.children.templates import merge_pod_spec, template_part
from moejob_operator.children.volumes import pod_volumes, volume_mounts

# The group that owns files on volumes; images run as a user of this group.
GROUP_ID = 65532
# Autoscalers that tidy up half-empty nodes would restart a whole gang each time; a job's own annotation wins.
_STAYS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
# An engine may load for half an hour; after that the kubelet restarts an engine that is silent for five minutes.
_LOADING_PROBES, _LIVING_PROBES = 180, 10
_NETWORKS = "k8s.v1.cni.cncf.io/networks"


def trainer_pod(attempt: Attempt, index: int) -> dict[str, Any]:
    """One pod of the gang. It never restarts by itself: the operator decides for the whole gang."""
    shared = colocated_per_pod(attempt.spec, attempt.layout.gpus_per_pod)
    default_image = attempt.images.trainer_colocated if shared else attempt.images.trainer
    image = attempt.spec.resources.image or default_image
    ready = {"httpGet": {"path": HttpPath.READY.value, "port": PodPort.PROGRESS.value}, "periodSeconds": 2}
    ports = [_port_field("progress", PodPort.PROGRESS), _port_field("rendezvous", PodPort.RENDEZVOUS)]
    container = {"image": image, "ports": ports, "readinessProbe": ready, "terminationMessagePolicy": "File"}
    spec = {"restartPolicy": "Never"}
    return _pod_manifest(attempt, PodRole.TRAINER, index, container, spec)


def rollout_pod(attempt: Attempt, index: int) -> dict[str, Any]:
    """One engine. The kubelet restarts it in its pod; the operator replaces only a lost pod."""
    image = attempt.spec.resources.rollout_image or attempt.images.rollout
    # The one path that needs no key; vLLM's own health check passes before the engine can generate.
    health = {"httpGet": {"path": HttpPath.READY.value, "port": PodPort.ROLLOUT.value}}
    container = {
        "image": image,
        "ports": [_port_field("rollout", PodPort.ROLLOUT)],
        "startupProbe": health | {"periodSeconds": 10, "failureThreshold": _LOADING_PROBES},
        "livenessProbe": health | {"periodSeconds": 30, "timeoutSeconds": 10, "failureThreshold": _LIVING_PROBES},
        "readinessProbe": health | {"periodSeconds": 5},
        # vLLM writes no termination message: the end of its log has the reason.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec = {"restartPolicy": "Always"}
    return _pod_manifest(attempt, PodRole.ROLLOUT, index, container, spec)


def _pod_manifest(
    attempt: Attempt, role: PodRole, index: int, container: dict[str, Any], spec: dict[str, Any]
) -> dict[str, Any]:
    marks = gang_marks(attempt, role)
    pod_metadata = job_metadata(attempt, attempt.pod_name(role, index))
    template = template_part(attempt.spec, role, "metadata")
    pod_metadata["labels"] = (
        dict(attempt.spec.resources.labels)
        | template.get("labels", {})
        | pod_metadata["labels"]
        | _place_labels(attempt, role, index)
        | marks.labels
    )
    stays = _STAYS if role is PodRole.TRAINER else {}
    annotations = stays | _job_annotations(attempt.spec) | template.get("annotations", {}) | marks.annotations
    if annotations:
        pod_metadata["annotations"] = annotations
    pod_spec = (
        spec
        | {"terminationGracePeriodSeconds": attempt.grace_seconds(role)}
        | _pod_spec(attempt, role, index)
        | marks.spec
        | {
            "containers": [_container_manifest(attempt, role, index, container)],
            "volumes": pod_volumes(attempt, role),
        }
    )
    patch = template_part(attempt.spec, role, "spec")
    return {
        "apiVersion": "v1",
        "kind": Kind.POD.value,
        "metadata": pod_metadata,
        "spec": merge_pod_spec(pod_spec, patch, len(attempt.spec.resources.env)),
    }


def _place_labels(attempt: Attempt, role: PodRole, index: int) -> dict[str, str]:
    return {
        Label.ROLE.value: role.value,
        Label.ATTEMPT.value: str(attempt.attempt_number(role)),
        Label.INDEX.value: str(index),
    } | _training_labels(attempt, role, index)


def _training_labels(attempt: Attempt, role: PodRole, index: int) -> dict[str, str]:
    """Labels as the pods of a PyTorchJob have them: one Master, and Workers that count from 0."""
    labels = {TrainingLabel.JOB_NAME.value: attempt.name, TrainingLabel.OPERATOR_NAME.value: MANAGED_BY}
    if role is PodRole.ROLLOUT:
        replica = {TrainingLabel.REPLICA_TYPE.value: role.value, TrainingLabel.REPLICA_INDEX.value: str(index)}
    elif index == 0:
        replica = {
            TrainingLabel.REPLICA_TYPE.value: "master",
            TrainingLabel.REPLICA_INDEX.value: "0",
            TrainingLabel.JOB_ROLE.value: "master",
        }
    else:
        replica = {TrainingLabel.REPLICA_TYPE.value: "worker", TrainingLabel.REPLICA_INDEX.value: str(index - 1)}
    return labels | replica


def _job_annotations(spec: Spec) -> dict[str, str]:
    rdma = spec.resources.rdma
    networks = {} if rdma is None or rdma.networks is None else {_NETWORKS: rdma.networks}
    return dict(spec.resources.annotations) | networks


def _pod_spec(attempt: Attempt, role: PodRole, index: int) -> dict[str, Any]:
    resources = attempt.spec.resources
    near = pod_affinity(attempt, role, index)
    optional = {
        "nodeSelector": dict(attempt.gpu_node_labels) | dict(resources.node_selector),
        "affinity": near,
        "schedulerName": resources.scheduler_name,
        "priorityClassName": resources.priority_class_name,
        "runtimeClassName": resources.runtime_class_name,
        "serviceAccountName": resources.service_account,
        "imagePullSecrets": [{"name": name} for name in resources.image_pull_secrets],
    }
    return {
        "hostname": attempt.pod_name(role, index),
        "subdomain": attempt.service,
        "automountServiceAccountToken": False,
        # These would be hundreds of variables for other jobs' Services, which no pod here reads.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "fsGroup": GROUP_ID,
            # Walking through terabytes of checkpoints at every start would take hours.
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "tolerations": pod_tolerations(attempt),
    } | {name: value for name, value in optional.items() if value}


def _container_manifest(attempt: Attempt, role: PodRole, index: int, container: dict[str, Any]) -> dict[str, Any]:
    spec = attempt.spec
    sources = environment_sources(spec)
    return (
        {"name": role.value}
        | container
        | {
            "imagePullPolicy": spec.resources.image_pull_policy.value,
            "env": environment_variables(attempt, role, index),
            **({"envFrom": sources} if sources else {}),
            "resources": _container_resources(attempt, role),
            "terminationMessagePath": PodPath.TERMINATION.value,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                # No IPC_LOCK for RDMA either: a user that is not root gets nothing of a capability that is added, and
                # no namespace but a privileged one admits the pod. The node limits how much may be pinned.
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": volume_mounts(attempt),
        }
    )


def _container_resources(attempt: Attempt, role: PodRole) -> dict[str, Any]:
    resources, pod = attempt.spec.resources, attempt.pod_resources[role]
    devices: dict[str, Any] = {}
    if resources.accelerator is Accelerator.GPU:
        devices[resources.gpu_resource] = ranks_per_pod(attempt, role)
    if resources.rdma is not None:
        devices[resources.rdma.resource] = resources.rdma.count
    parts = {"limits": devices | pod.limits, "requests": pod.requests | devices}
    return {name: amounts for name, amounts in parts.items() if amounts}


def _port_field(name: str, port: PodPort) -> dict[str, Any]:
    return {"name": name, "containerPort": port.value}
