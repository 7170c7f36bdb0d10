"""A job's patch of its pods: what it adds, what stays as the operator made it, and that each of its fields arrives."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from builders import merge_sections
from golden_manifests import GOLDEN, GoldenJob, render_manifests
from moejob_api.pod_template.checks import OPERATOR_VOLUMES
from moejob_api.rules.limits import JobLimits
from network_fragments import CLOSED, FRAGMENTS, NetworkFragment

SFT = next(golden for golden in GOLDEN if golden.name == "sft-two-nodes-rdma-topology").sections
ENGINES = next(golden for golden in GOLDEN if golden.name == "grpo-separate").sections
TRAINER = {"name": "trainer"}


# What a template may ask for is the matter of limits.
NO_LIMITS = JobLimits(host_paths=None, privileges=None)


def pods(sections: Any, limits: JobLimits = NO_LIMITS) -> list[dict[str, Any]]:
    manifests = yaml.safe_load_all(render_manifests(GoldenJob("patched", sections, limits=limits)))
    return [manifest for manifest in manifests if manifest["kind"] == "Pod"]


def patched(metadata: Any = None, **spec: Any) -> dict[str, Any]:
    """The first trainer pod of a job with this template."""
    template = {"spec": spec} | ({} if metadata is None else {"metadata": metadata})
    return pods(merge_sections(SFT, {"podTemplate": {"trainer": template}}))[0]


def plain() -> dict[str, Any]:
    return pods(SFT)[0]


def test_an_empty_template_changes_nothing() -> None:
    assert patched() == plain()


def test_labels_and_annotations_are_added_and_those_of_moejob_stay() -> None:
    metadata = patched({"labels": {"example.com/a": "b"}, "annotations": {"example.com/c": "d"}})["metadata"]
    assert metadata["labels"] == plain()["metadata"]["labels"] | {"example.com/a": "b"}
    assert metadata["annotations"] == plain()["metadata"]["annotations"] | {"example.com/c": "d"}


def test_the_container_of_the_trainer_gets_more_and_loses_nothing() -> None:
    amounts = {"limits": {"hugepages-2Mi": "64Mi"}, "requests": {"hugepages-2Mi": "64Mi"}}
    own: dict[str, Any] = TRAINER | {
        "env": [{"name": "HF_TOKEN", "value": "another"}, {"name": "FI_PROVIDER", "value": "efa"}],
        "envFrom": [{"configMapRef": {"name": "nccl"}}],
        "resources": amounts,
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    spec = patched(containers=[own], volumes=[{"name": "cache", "emptyDir": {}}])["spec"]
    [container], [before] = spec["containers"], plain()["spec"]["containers"]
    assert container["env"][:2] == own["env"]
    assert container["env"][2:] == before["env"][1:]
    assert container["envFrom"] == own["envFrom"]
    assert container["resources"] == {
        kind: before["resources"][kind] | {"hugepages-2Mi": "64Mi"} for kind in ("limits", "requests")
    }
    assert container["volumeMounts"] == [*before["volumeMounts"], *own["volumeMounts"]]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert spec["volumes"] == [*plain()["spec"]["volumes"], {"name": "cache", "emptyDir": {}}]
    changed = {"env", "envFrom", "resources", "volumeMounts", "securityContext"}
    assert {name: value for name, value in container.items() if name not in changed} == {
        name: value for name, value in before.items() if name not in changed
    }


def test_a_container_beside_the_trainer_ends_with_it_and_init_containers_come_before() -> None:
    first, beside = {"name": "first", "image": "a:1"}, {"name": "daemon", "image": "b:1"}
    spec = patched(containers=[beside], initContainers=[first])["spec"]
    assert [container["name"] for container in spec["containers"]] == ["trainer"]
    assert [(entry["name"], entry.get("restartPolicy")) for entry in spec["initContainers"]] == [
        ("first", None),
        ("daemon", "Always"),
    ]


def test_sidecars_are_restricted_unless_they_say_otherwise() -> None:
    free = {"name": "free", "image": "a:1", "securityContext": {"privileged": True}}
    spec = patched(containers=[{"name": "plain", "image": "a:1"}, free])["spec"]
    [restricted, privileged] = (entry["securityContext"] for entry in spec["initContainers"])
    assert restricted == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    # The API server refuses a container that is privileged and must not escalate.
    assert privileged == {"privileged": True, "capabilities": {"drop": ["ALL"]}}


def test_affinity_of_a_template_stands_beside_that_of_the_topology() -> None:
    term = {"labelSelector": {"matchLabels": {"example.com/cache": "hot"}}, "topologyKey": "example.com/rack"}
    node = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = {"podAffinity": {required: [term]}, "nodeAffinity": {required: node}}
    merged, before = patched(affinity=affinity)["spec"]["affinity"], plain()["spec"]["affinity"]
    assert merged["podAffinity"] == before["podAffinity"] | {required: [*before["podAffinity"][required], term]}
    assert merged["nodeAffinity"] == {required: node}


@pytest.mark.parametrize(
    "spec",
    [
        {"tolerations": [{"key": "a", "operator": "Exists"}]},
        {"nodeSelector": {"a": "b"}},
        {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}]},
        {"hostAliases": [{"ip": "192.0.2.1", "hostnames": ["a"]}]},
        {"dnsPolicy": "Default"},
        {"dnsConfig": {"searches": ["example.com"]}},
        {"runtimeClassName": "nvidia"},
        {"securityContext": {"supplementalGroups": [7]}},
    ],
    ids=lambda spec: next(iter(spec)),
)
def test_a_field_of_the_pod_arrives(spec: dict[str, Any]) -> None:
    [(name, value)] = spec.items()
    arrived, before = patched(**spec)["spec"][name], plain()["spec"].get(name)
    if isinstance(before, list):
        assert arrived == [*before, *value]
    elif isinstance(before, dict):
        assert arrived == before | value
    else:
        assert arrived == value


def test_a_pod_in_the_network_of_its_node_still_finds_its_peers() -> None:
    assert patched(hostNetwork=True)["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert patched(hostNetwork=True, dnsPolicy="Default")["spec"]["dnsPolicy"] == "Default"


def test_each_role_has_a_template_of_its_own() -> None:
    templates = {
        role: {"spec": {"containers": [{"name": f"beside-{role}", "image": "a:1"}]}} for role in ("trainer", "rollout")
    }
    made = pods(merge_sections(ENGINES, {"podTemplate": templates}))
    beside = {pod["metadata"]["labels"]["moejob.dev/role"]: pod["spec"]["initContainers"][0]["name"] for pod in made}
    assert beside == {"trainer": "beside-trainer", "rollout": "beside-rollout"}


def test_pods_do_not_read_the_template_in_their_environment() -> None:
    sections = merge_sections(SFT, {"podTemplate": {"trainer": {"spec": {"runtimeClassName": "known-by-this-name"}}}})
    [container] = pods(sections)[0]["spec"]["containers"]
    assert all("known-by-this-name" not in str(variable) for variable in container["env"])


def test_names_of_moejobs_volumes_are_known_to_the_rules() -> None:
    for golden in GOLDEN:
        for pod in pods(golden.sections):
            names = {volume["name"] for volume in pod["spec"]["volumes"]}
            assert {name for name in names if not name.startswith("claim-")} == set(OPERATOR_VOLUMES)


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda fragment: fragment.name)
def test_the_network_of_a_cloud_is_merged_into_every_trainer_within_the_limits_that_it_names(
    fragment: NetworkFragment,
) -> None:
    job = merge_sections(SFT, {}) | fragment.sections
    with pytest.raises(AssertionError, match="beyond the limits"):
        pods(job, JobLimits.model_validate(CLOSED))
    made = pods(job, JobLimits.model_validate(fragment.limits))
    assert len(made) == 2
    template = fragment.sections["podTemplate"]["trainer"]
    own = next(entry for entry in template["spec"]["containers"] if entry["name"] == "trainer")
    for pod in made:
        [container] = pod["spec"]["containers"]
        assert {variable["name"] for variable in own["env"]} <= {variable["name"] for variable in container["env"]}
        assert template.get("metadata", {}).get("annotations", {}).items() <= pod["metadata"]["annotations"].items()
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {volume["name"] for volume in template["spec"].get("volumes", ())} <= volumes
