"""The inputs of the manifests of one attempt, and the names that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moejob_api.contract.pods import MANAGED_BY, Label, Role, pod_name
from moejob_api.derived import RolloutLayout
from moejob_api.job import GROUP, KIND, VERSION, Spec
from moejob_api.job.grpo import Placement
from moejob_api.job.lifecycle import Gang
from moejob_api.layout.sizes import Layout

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
    """Peers outside a job that its NetworkPolicy lets read the progress of its pods."""

    operator_namespace: str
    metrics_from: tuple[Mapping[str, Any], ...] = ()


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
    gang: Gang
    images: Images
    trainer_grace_seconds: int
    # None: the operator makes no policy.
    network: JobNetwork | None = None

    @property
    def claim(self) -> str:
        """The claim that checkpoints live on."""
        return claim_of(self.name, self.spec)

    @property
    def access(self) -> str:
        """The name of the job's Secret and NetworkPolicy. It has the UID in it: an existing object is this job's."""
        return f"{self.name}-{self.uid[:8]}"

    @property
    def pod_group(self) -> str:
        """The object of the gang scheduler."""
        return self.name

    @property
    def engines(self) -> int:
        """Separate rollout pods, one for each engine."""
        if self.rollout is None or self.spec.grpo is None:
            return 0
        return self.rollout.engines if self.spec.grpo.rollout.placement is Placement.SEPARATE else 0

    def pod(self, role: Role, index: int) -> str:
        """The name of a pod, which is also its host name."""
        return pod_name(self.name, role, self.number_of(role), index)

    def grace_seconds(self, role: Role) -> int:
        """Return the time between a pod's SIGTERM and its SIGKILL."""
        return self.trainer_grace_seconds if role is Role.TRAINER else ENGINE_GRACE_SECONDS

    def number_of(self, role: Role) -> int:
        """The attempt that a pod of this role belongs to."""
        return self.number if role is Role.TRAINER else ROLLOUT_ATTEMPT

    def host(self, role: Role, index: int) -> str:
        """A pod's name as the others can resolve it, whatever the cluster's domain is called."""
        return f"{self.pod(role, index)}.{self.service}.{self.namespace}.svc"

    def hosts(self, role: Role) -> Iterator[str]:
        """All pods of a role, in order."""
        count = self.layout.nodes if role is Role.TRAINER else self.engines
        return (self.host(role, index) for index in range(count))


def service_of(job: str) -> str:
    """The Service of a job. Its suffix keeps a job from taking a DNS name that others look up."""
    return f"{job}-moejob"


def former_service_of(job: str) -> str:
    """The Service that a former version of the operator made, by which pods that it created are found."""
    return job


def claim_of(job: str, spec: Spec) -> str:
    """The claim that the checkpoints of a job live on."""
    return spec.storage.claim_name or f"{job}-storage"


def metadata(attempt: Attempt, name: str) -> dict[str, Any]:
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
