"""The inputs of the manifests of one attempt, and the names that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moejob_api.contract.pods import MANAGED_BY, Label, PodRole, pod_name
from moejob_api.derived import RolloutLayout
from moejob_api.job import GROUP, KIND, VERSION, Spec
from moejob_api.job.grpo import RolloutPlacement
from moejob_api.job.lifecycle import GangScheduler
from moejob_api.layout.sizes import Layout
from moejob_api.planner.pod_resources import PodResources

# Engines outlive gangs: loading a model takes minutes, and the trainer syncs its weights to running engines.
ROLLOUT_ATTEMPT = 0
# An engine has nothing to save.
ENGINE_GRACE_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Images:
    """The images of jobs that name none."""

    trainer: str
    # For trainer pods that share GPUs with engines; it holds the rollout environment too.
    trainer_colocated: str
    rollout: str


@dataclass(frozen=True, slots=True)
class JobNetwork:
    """Peers outside a job that its NetworkPolicy lets read the progress of its pods, and peers that its pods reach."""

    operator_namespace: str
    metrics_from: tuple[Mapping[str, Any], ...] = ()
    bounds_egress: bool = False
    # Rules of a NetworkPolicy, beside those that every job needs.
    egress_rules: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of one job. `gang` is decided: never Auto."""

    name: str
    namespace: str
    uid: str
    spec: Spec
    layout: Layout
    rollout: RolloutLayout | None
    # The headless Service, which is also the subdomain of every pod.
    service: str
    number: int
    gang: GangScheduler
    images: Images
    # Of a pod of each role that the job has.
    pod_resources: Mapping[PodRole, PodResources]
    # Of the GPU type that the job names, by the installation's table.
    gpu_node_labels: Mapping[str, str]
    trainer_grace_seconds: int
    # None: the operator makes no policy.
    network: JobNetwork | None = None

    @property
    def claim_name(self) -> str:
        """The claim that checkpoints live on."""
        return claim_name(self.name, self.spec)

    @property
    def access_name(self) -> str:
        """The name of the job's Secret and NetworkPolicy. It has the UID in it: an existing object is this job's."""
        return f"{self.name}-{self.uid[:8]}"

    @property
    def pod_group_name(self) -> str:
        """The object of the gang scheduler."""
        return self.name

    @property
    def trainer_count(self) -> int:
        """Pods of the gang, and spares beyond them."""
        return self.layout.nodes + self.spec.resources.spares

    @property
    def engine_count(self) -> int:
        """Separate rollout pods, one for each engine."""
        if self.rollout is None or self.spec.grpo is None:
            return 0
        return self.rollout.engines if self.spec.grpo.rollout.placement is RolloutPlacement.SEPARATE else 0

    def pod_name(self, role: PodRole, index: int) -> str:
        """The name of a pod, which is also its host name."""
        return pod_name(self.name, role, self.attempt_number(role), index)

    def grace_seconds(self, role: PodRole) -> int:
        """Return the time between a pod's SIGTERM and its SIGKILL."""
        return self.trainer_grace_seconds if role is PodRole.TRAINER else ENGINE_GRACE_SECONDS

    def attempt_number(self, role: PodRole) -> int:
        """The attempt that a pod of this role belongs to."""
        return self.number if role is PodRole.TRAINER else ROLLOUT_ATTEMPT

    def host_name(self, role: PodRole, index: int) -> str:
        """A pod's name as the others can resolve it, whatever the cluster's domain is called."""
        return f"{self.pod_name(role, index)}.{self.service}.{self.namespace}.svc"

    def host_names(self, role: PodRole) -> Iterator[str]:
        """All pods of a role, in order."""
        count = self.layout.nodes if role is PodRole.TRAINER else self.engine_count
        return (self.host_name(role, index) for index in range(count))

    def spare_hosts(self) -> Iterator[str]:
        """Return the host names of spares, in order."""
        return (self.host_name(PodRole.TRAINER, index) for index in range(self.layout.nodes, self.trainer_count))


def service_name(job: str) -> str:
    """The Service of a job. Its suffix keeps a job from taking a DNS name that others look up."""
    return f"{job}-moejob"


def former_service_name(job: str) -> str:
    """The Service that a former version of the operator made, by which pods that it created are found."""
    return job


def claim_name(job: str, spec: Spec) -> str:
    """The claim that the checkpoints of a job live on."""
    return spec.storage.claim_name or f"{job}-storage"


def job_metadata(attempt: Attempt, name: str) -> dict[str, Any]:
    """The metadata of an object that lives and dies with the job."""
    return {
        "name": name,
        "namespace": attempt.namespace,
        "labels": job_labels(attempt),
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": attempt.name,
                "uid": attempt.uid,
                "controller": True,
                # True would need a right to the job's finalizers, to delay a deletion that nothing here delays.
                "blockOwnerDeletion": False,
            }
        ],
    }


def job_labels(attempt: Attempt) -> dict[str, str]:
    """Labels that everything of the job carries."""
    return {
        Label.MANAGED_BY.value: MANAGED_BY,
        Label.JOB.value: attempt.name,
        Label.JOB_UID.value: attempt.uid,
    }
