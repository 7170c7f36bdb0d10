"""Manifests are those that were reviewed, and every pod keeps to the restricted Pod Security profile."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from golden_manifests import FOLDER, GOLDEN, GoldenJob, render_manifests

EVERY = pytest.mark.parametrize("golden", [pytest.param(found, id=found.name) for found in GOLDEN])


@EVERY
def test_a_job_gets_the_objects_that_were_reviewed(golden: GoldenJob) -> None:
    assert render_manifests(golden) == (FOLDER / f"{golden.name}.yaml").read_text(), (
        "if that is meant, make generate and review"
    )


def test_no_reviewed_file_is_of_a_job_that_is_no_more() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == {golden.name for golden in GOLDEN}


@EVERY
def test_pods_keep_to_the_restricted_profile(golden: GoldenJob) -> None:
    for pod in pods(golden):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}} <= {
            "emptyDir",
            "persistentVolumeClaim",
        }
        [container] = spec["containers"]
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        # With cards for RDMA too: a user that is not root gets nothing of a capability that is added.
        assert security["capabilities"] == {"drop": ["ALL"]}


@EVERY
def test_no_pod_is_the_first_to_be_evicted(golden: GoldenJob) -> None:
    for pod in pods(golden):
        [container] = pod["spec"]["containers"]
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}


@EVERY
def test_pods_share_one_secret_that_no_manifest_holds(golden: GoldenJob) -> None:
    made = [*yaml.safe_load_all(render_manifests(golden))]
    [secret] = (one for one in made if one["kind"] == "Secret")
    assert not secret.keys() & {"data", "stringData"}
    reference = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "secret"}}
    for pod in pods(golden):
        # The last of a name wins: not the job's own variable.
        found = [one for one in pod["spec"]["containers"][0]["env"] if one["name"] == "MOEJOB_SECRET"]
        assert found[-1] == {"name": "MOEJOB_SECRET", "valueFrom": reference}


@EVERY
def test_the_policy_of_a_job_is_for_all_of_its_pods_and_lets_in_no_others_but_the_operator(golden: GoldenJob) -> None:
    [policy] = (one for one in yaml.safe_load_all(render_manifests(golden)) if one["kind"] == "NetworkPolicy")
    spec, uid = policy["spec"], {"moejob.dev/job-uid": "6f1c"}
    assert spec["podSelector"] == {"matchLabels": uid}
    assert all(uid.items() <= pod["metadata"]["labels"].items() for pod in pods(golden))
    assert spec["policyTypes"] == ["Ingress"]
    one_another, observers = spec["ingress"]
    assert one_another == {"from": [{"podSelector": {"matchLabels": uid}}]}
    [operator] = observers["from"]
    assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "moejob-system"}}
    assert observers["ports"] == [{"port": 9400, "protocol": "TCP"}]


def pods(golden: GoldenJob) -> list[dict[str, Any]]:
    """Every pod of a job."""
    found = [made for made in yaml.safe_load_all(render_manifests(golden)) if made["kind"] == "Pod"]
    assert found
    return found
