"""JobSet beside us, where its source is: $JOBSET_SRC names a checkout, of which Go builds the manager into the cache.

Its webhooks only fill in what is left out here: its jobs are written in full, and are not called.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contest.contenders import Contender, define_resource, our_job, user_of
from benchmarks.contest.pods import Body, pod_template
from cluster.binaries import Report, alone, cache, go_build
from cluster.control_plane.certificates import new_authority
from cluster.control_plane.plane import ControlPlane
from cluster.processes import Process
from ports import free_port

NAME = "JobSet"
_DEFINITION = "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
_ACCOUNT = "jobset"


class NoSourceError(Exception):
    """A folder that is no checkout of JobSet."""


@dataclass(frozen=True, slots=True)
class JobSetBuild:
    """A manager, the definition of what it manages, and what its source calls its version."""

    manager: Path
    definition: Path
    version: str


def built_job_set(source: Path, report: Report) -> JobSetBuild:
    """Build the manager; with nothing changed since the last time Go takes a second."""
    definition = source / _DEFINITION
    if not definition.exists():
        raise NoSourceError(f"JOBSET_SRC={source} has no {_DEFINITION}: name a checkout of kubernetes-sigs/jobset")
    manager = cache() / "jobset" / "manager"
    manager.parent.mkdir(parents=True, exist_ok=True)
    with alone(manager.parent, report):
        report(f"building JobSet in {source}")
        go_build(source, ".", "-s -w", manager)
    asked = ["git", "describe", "--tags", "--always", "--dirty"]
    described = subprocess.run(asked, cwd=source, capture_output=True, text=True, check=False)
    return JobSetBuild(manager, definition, described.stdout.strip() or "of unknown version")


def job_sets(plane: ControlPlane, build: JobSetBuild, namespace: str) -> Contender:
    """Its manager, as it is released but for the leader that it need not elect."""
    define_resource(plane, build.definition, "jobsets")
    user = user_of(plane, namespace, _ACCOUNT)
    folder = plane.folder / f"jobset-{namespace}"
    certificates = new_authority(folder).server("tls", "DNS:localhost,IP:127.0.0.1")
    health, metrics, webhooks = (free_port() for _ in range(3))
    settings = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": f"127.0.0.1:{metrics}", "certDir": str(certificates.certificate.parent)},
        "webhook": {"host": "127.0.0.1", "port": webhooks, "certDir": str(certificates.certificate.parent)},
    }
    file = folder / "settings.yaml"
    file.write_text(json.dumps(settings))
    kubeconfig = plane.service_account_kubeconfig(namespace, _ACCOUNT)
    contender = Contender(
        name=NAME,
        namespace=namespace,
        user=user,
        collection=f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets",
        label="jobset.sigs.k8s.io/jobset-name",
        body=job_set,
        process=Process(
            f"jobset-{namespace}", [build.manager, f"--config={file}", f"--kubeconfig={kubeconfig}"], folder
        ),
        url=f"https://127.0.0.1:{metrics}",
        token=plane.token(namespace, _ACCOUNT),
        timed=("controller_runtime_reconcile_time_seconds", 'controller="jobset"'),
    )
    return contender.start()


def job_set(name: str, pods: int) -> Body:
    """One group whose pods are those of our job, started again together when one fails, as ours are."""
    template = pod_template(our_job(name, pods), "trainer")
    group = {
        "name": "trainer",
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": pods,
                "completions": pods,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "template": template | {"spec": template["spec"] | {"restartPolicy": "Never"}},
            }
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "replicatedJobs": [group],
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
            "failurePolicy": {"maxRestarts": 3},
        },
    }
