"""Faults of a template, in sentences that name the place and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from builders import spec
from moejob_api.pod_template.checks import template_complaints
from moejob_api.pod_template.in_cel import template_variables_cel
from moejob_api.pod_template.reading import MOST_BYTES, UNTOUCHED


def beside(**container: Any) -> list[dict[str, Any]]:
    return [{"name": "beside", "image": "a:1", **container}]


def own(**container: Any) -> list[dict[str, Any]]:
    return [{"name": "trainer", **container}]


def complaints(metadata: Any = None, **template_spec: Any) -> list[str]:
    template = {"spec": template_spec} | ({} if metadata is None else {"metadata": metadata})
    return list(template_complaints(spec(podTemplate={"trainer": template})))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"restartPolicy": "Always"}, "trainer.spec.restartPolicy is no field of a template; moejob decides"),
        ({"schedulerName": "a"}, "use spec.resources.schedulerName"),
        ({"bogus": 1}, "trainer.spec.bogus is no field of a template; remove it"),
        ({"containers": beside(bogus=1)}, "trainer.spec.containers[0].bogus is no field"),
        ({"containers": [{"image": "a:1"}]}, "trainer.spec.containers[0].name: field required"),
        ({"containers": [{"name": "beside"}]}, "beside is beside the container trainer and needs an image"),
        ({"containers": [*beside(), *beside()]}, "beside is given twice"),
        ({"containers": [{"name": "rollout", "image": "a:1"}]}, "rollout is the container of other pods"),
        ({"initContainers": own(image="a:1")}, "patch it in containers"),
        ({"initContainers": beside(livenessProbe={"tcpSocket": {"port": 1}})}, "need restartPolicy: Always"),
        ({"containers": own(image="a:1")}, "image of trainer is moejob's; use spec.resources.image"),
        ({"containers": own(command=["sh"])}, "command of trainer is moejob's; remove it"),
        ({"containers": own(readinessProbe={"tcpSocket": {"port": 1}})}, "readinessProbe of trainer is moejob's"),
        ({"containers": own(env=[{"name": "MOEJOB_UID", "value": "a"}])}, "MOEJOB_UID of trainer is set by moejob"),
        ({"containers": own(env=[{"name": "RANK", "value": "a"}])}, "RANK of trainer is set by moejob"),
        ({"containers": own(resources={"limits": {"memory": "1Gi"}})}, "memory of trainer follows from spec.resources"),
        ({"containers": own(resources={"limits": {"nvidia.com/gpu": 1}})}, "nvidia.com/gpu of trainer follows"),
        ({"volumes": [{"name": "storage", "emptyDir": {}}]}, "storage is a volume of moejob's"),
        ({"volumes": [{"name": "claim-0", "emptyDir": {}}]}, "claim-0 is a volume of moejob's"),
        ({"volumes": [{"name": "a"}]}, "a needs exactly one source, 0 are given"),
        ({"volumes": [{"name": "a", "emptyDir": {}, "hostPath": {"path": "/a"}}]}, "2 are given"),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/a/../b"}}]}, "steps back by .."),
        ({"volumes": [{"name": "a", "nfs": {}}]}, "trainer.spec.volumes[0].nfs is no field"),
        ({"volumes": [{"name": "a", "projected": {"sources": [{"serviceAccountToken": {}}]}}]}, "have no token"),
        ({"containers": beside(volumeMounts=[{"name": "a", "mountPath": "/a"}])}, "no volume of the template"),
        ({"containers": own(volumeMounts=[{"name": "storage", "mountPath": "/dev"}])}, "/dev would hide /dev/shm"),
        ({"containers": own(volumeMounts=[{"name": "storage", "mountPath": "/claims/a"}])}, "would hide /claims"),
        ({"containers": beside(env=[{"name": "A", "value": "1", "valueFrom": {}}])}, "one value or one valueFrom"),
        ({"containers": beside(envFrom=[{}])}, "exactly one of secretRef and configMapRef"),
        ({"dnsPolicy": "None"}, "None needs dnsConfig"),
        ({"hostAliases": [{"ip": "a" * MOST_BYTES, "hostnames": []}]}, "put files into a ConfigMap"),
        (
            {
                "affinity": {
                    "podAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "a", "namespaces": ["a"]}]
                    }
                }
            },
            "namespaces",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_template_that_cannot_work_is_refused(template: dict[str, Any], says: str) -> None:
    assert says in "\n".join(complaints(**template))


def test_a_label_of_moejobs_stays_moejobs_whatever_is_reserved() -> None:
    [complaint] = complaints({"labels": {"moejob.dev/job-uid": "another"}})
    assert complaint == "trainer.metadata: moejob.dev/job-uid is set by moejob; remove it"


def test_a_template_that_uses_every_kind_of_field_is_accepted() -> None:
    sidecar = beside(
        env=[{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        ports=[{"containerPort": 80}],
        startupProbe={"httpGet": {"path": "/", "port": 80}},
        lifecycle={"preStop": {"sleep": {"seconds": 1}}},
        # The run's volume is there for a sidecar that uploads.
        volumeMounts=[{"name": "storage", "mountPath": "/run", "readOnly": True}],
    )
    assert complaints({"labels": {"example.com/a": "b"}}, containers=sidecar, hostNetwork=True) == []


@pytest.mark.parametrize(
    "field", sorted(set(UNTOUCHED) - {"namespaces", "namespaceSelector", "serviceAccountToken", "volumeDevices"})
)
def test_a_field_that_stays_as_it_is_is_refused_with_the_reason(field: str) -> None:
    [complaint] = complaints(**{field: "a"})
    assert complaint == f"trainer.spec.{field} is no field of a template; {UNTOUCHED[field]}"


def test_a_null_is_an_absent_field() -> None:
    assert complaints(hostNetwork=None, containers=beside(env=None)) == []


def test_variables_of_the_policy_of_limits_name_what_templates_hold() -> None:
    assert list(template_variables_cel())[-3:] == ["podSpecs", "containers", "volumes"]
