"""The chart's manifests of its values, as far as Helm alone can tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import CHART, NAMESPACE, Helm, Object, RenderedChart, Values
from limit_cases import ALLOWED
from moejob_api.pod_template.in_cel import template_variables_cel
from moejob_operator.reachable import CLOSED_PORT, OPEN_PORT

ROOT = Path(__file__).parents[2]
GENERATED = (ROOT / "crds" / "moetrainingjobs.yaml", ROOT / "crds" / "moetrainingprofiles.yaml")
RULES = ROOT / "crds" / "rules.yaml"
CLUSTER_SCOPED = {
    *{"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "ValidatingWebhookConfiguration"},
    *{"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"},
}

EVERYTHING: Values = {
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
    },
    "networkPolicy": {"egress": True, "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "images": {"registry": "registry.example.com:5000/ml/", "pullSecrets": [{"name": "registry"}]},
    "serviceAccount": {"annotations": {"example.com/role": "operator"}},
    "podAnnotations": {"example.com/a": "b"},
    "podLabels": {"example.com/c": "d"},
    "priorityClassName": "system-cluster-critical",
    "affinity": {"nodeAffinity": {}},
    "runAsUser": None,
    "limits": ALLOWED,
}
NOTHING: Values = {
    "namespaces": ["team-a"],
    "crd": {"install": False},
    "rbac": {"nodes": False},
    "webhook": {"enabled": False},
    "admissionPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "tolerations": [],
    "nodeSelector": None,
}
CERT_MANAGER: Values = {"webhook": {"certificates": "CertManager"}}
VALUES = pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="defaults"),
        pytest.param(EVERYTHING, id="everything"),
        pytest.param(NOTHING, id="as little as can be"),
        pytest.param({"namespaces": ["team-a", NAMESPACE], **CERT_MANAGER}, id="two namespaces, one its own"),
        pytest.param(CERT_MANAGER, id="cert-manager"),
        pytest.param(
            {"webhook": {"certificates": "CertManager", "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}},
            id="an issuer that is there",
        ),
        pytest.param({"global": {"shared": 1}, "enabled": True}, id="as part of another chart"),
    ],
)


def identity(found: Object) -> tuple[str, str, str | None]:
    return found["kind"], found["metadata"]["name"], found["metadata"].get("namespace")


@VALUES
def test_the_chart_is_well_formed(helm: Helm, values: Values) -> None:
    helm.run("lint", "--strict", CHART, values=values)


@VALUES
def test_every_object_is_one_of_its_name_and_says_whose_it_is(helm: Helm, values: Values) -> None:
    objects = helm.render(values).objects
    assert len({identity(found) for found in objects}) == len(objects)
    for found in objects:
        labels = found["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "moejob"
        assert labels["app.kubernetes.io/instance"] == "moejob"
        assert ("namespace" in found["metadata"]) is (found["kind"] not in CLUSTER_SCOPED)


@pytest.mark.parametrize("file", ["Chart.yaml", "values.yaml"])
def test_no_key_of_the_chart_stands_twice(file: str) -> None:
    """Helm takes the last of two values, and so hides a change of the first."""
    assert repeated_keys(yaml.compose((CHART / file).read_text(), yaml.SafeLoader)) == []


def test_a_key_that_stands_twice_is_seen() -> None:
    assert repeated_keys(yaml.compose("a: {b: 1, c: [{d: 1, d: 2}]}\na: 2", yaml.SafeLoader)) == ["a", "d"]


def repeated_keys(node: yaml.Node | None) -> list[str]:
    """Return each key that a mapping has twice, in it or in what it holds."""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        inner = [name for _, value in node.value for name in repeated_keys(value)]
        return [*sorted({name for name in names if names.count(name) > 1}), *inner]
    if isinstance(node, yaml.SequenceNode):
        return [name for item in node.value for name in repeated_keys(item)]
    return []


def test_the_chart_is_of_the_version_that_it_installs() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = (ROOT / "VERSION").read_text().strip()
    assert (about["version"], about["appVersion"]) == (version, version)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        pytest.param({}, "moejob-operator:{version}", id="defaults"),
        pytest.param(
            {"registry": "registry.example.com/ml"}, "registry.example.com/ml/moejob-operator:{version}", id="r"
        ),
        pytest.param({"registry": "a.b:5000/", "tag": "main"}, "a.b:5000/moejob-operator:main", id="with a port"),
        pytest.param(
            {"tag": "main", "operator": f"op@sha256:{'a' * 64}"},
            f"op@sha256:{'a' * 64}",
            id="a digest is the last word",
        ),
    ],
)
def test_an_image_is_registry_name_and_version(helm: Helm, images: Values, expected: str) -> None:
    version = (ROOT / "VERSION").read_text().strip()
    assert helm.render({"images": images}).container["image"] == expected.format(version=version)


# --- the definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "policy"), [(True, "keep"), (False, None)])
def test_the_definition_is_the_generated_one_and_part_of_the_release(
    helm: Helm, keep: bool, policy: str | None
) -> None:
    rendered = helm.render({"crd": {"keep": keep}})
    generated = [found for file in GENERATED for found in yaml.load_all(file.read_text(), yaml.CSafeLoader)]
    assert len(generated) == len(rendered.find_all("CustomResourceDefinition")) == 3
    for expected in generated:
        found = rendered.find_one("CustomResourceDefinition", expected["metadata"]["name"])
        assert found["spec"] == expected["spec"]
        assert found["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == policy
    assert not (CHART / "crds").exists(), "Helm never upgrades what is in crds/"


def test_the_rules_of_jobs_come_with_their_definition_and_go_with_the_release(helm: Helm) -> None:
    installed, beside = helm.render({}), helm.render({"crd": {"install": False}})
    for generated in yaml.load_all(RULES.read_text(), yaml.CSafeLoader):
        name = generated["metadata"]["name"]
        found = installed.find_one(generated["kind"], name)
        assert found["spec"] == generated["spec"]
        assert "annotations" not in found["metadata"]
        assert name not in {each["metadata"]["name"] for each in beside.find_all(generated["kind"])}


# --- rights ---------------------------------------------------------------------------------------------------------


def resources(role: Object) -> set[str]:
    return {resource for rule in role["rules"] for resource in rule["resources"]}


def test_who_serves_all_namespaces_has_its_rights_everywhere(helm: Helm) -> None:
    rendered = helm.render()
    assert {"moetrainingjobs", "pods", "nodes", "validatingwebhookconfigurations"} <= resources(
        rendered.find_one("ClusterRole", "moejob-operator")
    )
    assert {role["metadata"]["namespace"] for role in operator_roles(rendered)} == {NAMESPACE}


def operator_roles(rendered: RenderedChart) -> list[Object]:
    return [role for role in rendered.find_all("Role") if "helm.sh/hook" not in role["metadata"].get("annotations", {})]


def test_who_serves_some_namespaces_has_its_rights_there_and_sees_only_nodes_and_profiles_beyond(helm: Helm) -> None:
    rendered = helm.render({"namespaces": ["team-a", "team-b"], **CERT_MANAGER})
    for namespace in ("team-a", "team-b"):
        [role] = [role for role in operator_roles(rendered) if role["metadata"]["namespace"] == namespace]
        assert {"moetrainingjobs", "pods"} <= resources(role)
    beyond = rendered.find_one("ClusterRole", f"moejob-operator-{NAMESPACE}")
    assert resources(beyond) == {"nodes", "clustermoetrainingprofiles"}
    [selected] = rendered.find_one("ValidatingWebhookConfiguration")["webhooks"][0]["namespaceSelector"][
        "matchExpressions"
    ]
    assert (selected["key"], selected["operator"]) == ("kubernetes.io/metadata.name", "In")
    assert selected["values"] == ["team-a", "team-b"]


def test_nobody_needs_rights_beyond_namespaces_to_install_as_little_as_can_be(helm: Helm) -> None:
    kinds = {found["kind"] for found in helm.render(NOTHING).objects}
    assert not kinds & CLUSTER_SCOPED


def rules(rendered: RenderedChart) -> list[tuple[Object, dict[str, Any]]]:
    return [
        (role, rule) for kind in ("Role", "ClusterRole") for role in rendered.find_all(kind) for rule in role["rules"]
    ]


@VALUES
def test_no_right_is_to_everything_and_secrets_are_known_by_name(helm: Helm, values: Values) -> None:
    for _, rule in rules(helm.render(values)):
        granted = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
        assert "*" not in granted
        if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
            assert rule["resourceNames"] == ["moejob-webhook-certificate"]
            assert set(rule["verbs"]) <= {"get", "patch"}


@VALUES
def test_every_role_is_given_to_the_account_that_runs_and_to_nobody_else(helm: Helm, values: Values) -> None:
    rendered = helm.render(values)
    account = rendered.pod["spec"]["serviceAccountName"]
    assert {"moejob-operator", "moejob-operator-test"} == {
        found["metadata"]["name"] for found in rendered.find_all("ServiceAccount")
    }
    for kind in ("Role", "ClusterRole"):
        given = {
            (binding["roleRef"]["name"], binding["metadata"].get("namespace")): binding["subjects"]
            for binding in rendered.find_all(f"{kind}Binding")
        }
        roles = {identity(role)[1:] for role in rendered.find_all(kind) if role["metadata"]["name"] not in USER_ROLES}
        assert set(given) == roles
        for (name, _), subjects in given.items():
            expected = f"{account}-test" if "test" in name else account
            assert subjects == [{"kind": "ServiceAccount", "name": expected, "namespace": NAMESPACE}]


USER_ROLES = {"moejob-view", "moejob-edit"}


# Checked where an installation sets no limits.
CLOSED = {"labels", "reserved", "hostPaths", "privileges"}


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "checked"),
    [
        pytest.param({}, CLOSED, id="by default only keys of labels"),
        pytest.param({"claims": [], "images": ["a/*"]}, CLOSED | {"claims", "images"}, id="those that are given"),
        pytest.param(ALLOWED, {"reserved", *ALLOWED}, id="all"),
        pytest.param({"requireQueue": True}, CLOSED, id="a queue"),
    ],
)
def test_the_api_server_checks_the_limits_that_are_given(helm: Helm, limits: Values, checked: set[str]) -> None:
    spec = _limits(helm.render({"limits": limits}), "ValidatingAdmissionPolicy")["spec"]
    assert {variable["name"] for variable in spec["variables"]} == checked | template_variables_cel().keys()
    expressions = {validation["expression"] for validation in spec["validations"]}
    [served] = [expression for expression in expressions if "request.namespace" in expression]
    assert f'["kube-*","{NAMESPACE}"]' in served
    queue = {"has(object.spec.lifecycle.queue) || has(object.spec.profile)"} if limits.get("requireQueue") else set()
    assert expressions == {f"variables.{name}.size() == 0" for name in checked} | {served} | queue


@pytest.mark.parametrize(
    ("values", "unserved"),
    [
        pytest.param({}, ["kube-*", NAMESPACE], id="neither Kubernetes' own nor the release's"),
        pytest.param({"serveOwnNamespace": True}, ["kube-*"], id="the release's, too"),
        pytest.param({"serveOwnNamespace": True, "limits": {"unservedNamespaces": []}}, [], id="all"),
        pytest.param({"namespaces": [NAMESPACE, "kube-x"], **CERT_MANAGER}, [], id="those that are named"),
    ],
)
def test_jobs_are_refused_where_no_jobs_are_meant_to_be(helm: Helm, values: Values, unserved: list[str]) -> None:
    rendered = helm.render(values)
    limits = json.loads(rendered.environment["MOEJOB_OPERATOR_LIMITS"])
    assert limits["unservedNamespaces"] == unserved
    policy = str(_limits(rendered, "ValidatingAdmissionPolicy")["spec"])
    assert ("request.namespace" in policy) is bool(unserved)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        pytest.param({}, {}, id="everywhere"),
        pytest.param(
            {"namespaces": ["team-a"], **CERT_MANAGER},
            {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]},
            id="in the namespaces that are served",
        ),
    ],
)
def test_limits_hold_where_the_operator_serves(helm: Helm, values: Values, where: Object) -> None:
    rendered = helm.render(values)
    binding = _limits(rendered, "ValidatingAdmissionPolicyBinding")["spec"]
    assert binding["policyName"] == _limits(rendered, "ValidatingAdmissionPolicy")["metadata"]["name"]
    assert binding["validationActions"] == ["Deny"]
    selected = binding.get("matchResources", {}).get("namespaceSelector", {}).get("matchExpressions", [{}])
    assert selected == [where]


# --- pods -----------------------------------------------------------------------------------------------------------


@VALUES
def test_pods_keep_to_the_restricted_standard_and_write_nowhere(helm: Helm, values: Values) -> None:
    rendered = helm.render(values)
    for pod in (rendered.pod["spec"], rendered.find_one("Pod")["spec"]):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]


def test_the_cluster_chooses_the_user_where_the_chart_names_none(helm: Helm) -> None:
    assert helm.render().pod["spec"]["securityContext"]["runAsUser"] == 65532
    assert "runAsUser" not in helm.render(EVERYTHING).pod["spec"]["securityContext"]


@VALUES
def test_every_service_budget_and_policy_finds_the_pods_of_the_operator_and_not_of_the_test(
    helm: Helm, values: Values
) -> None:
    rendered = helm.render(values)
    selectors = [rendered.find_one("Deployment")["spec"]["selector"]["matchLabels"]]
    selectors += [found["spec"]["selector"] for found in rendered.find_all("Service") if not is_hook(found)]
    selectors += [found["spec"]["selector"]["matchLabels"] for found in rendered.find_all("PodDisruptionBudget")]
    policies = [found for found in rendered.find_all("NetworkPolicy") if not is_hook(found)]
    selectors += [found["spec"]["podSelector"]["matchLabels"] for found in policies]
    for selector in selectors:
        assert selector.items() <= rendered.pod["metadata"]["labels"].items()
        assert not selector.items() <= rendered.find_one("Pod")["metadata"]["labels"].items()
    for monitor in rendered.find_all("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        ports = {port["name"] for service in rendered.find_all("Service") for port in service["spec"]["ports"]}
        assert wanted.items() <= rendered.find_one("Service", "moejob-operator")["metadata"]["labels"].items()
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def is_hook(found: Object) -> bool:
    """Return whether an object is there only while `helm test` runs."""
    return "helm.sh/hook" in found["metadata"].get("annotations", {})


@VALUES
def test_helm_test_has_a_pod_of_its_own_to_see_whether_policies_are_enforced(helm: Helm, values: Values) -> None:
    rendered = helm.render(values)
    command = rendered.find_one("Pod")["spec"]["containers"][0]["command"]
    if values.get("networkPolicy", {}).get("enabled") is False:
        assert not any("--policy-target" in word for word in command)
        return
    assert f"--policy-target=moejob-operator-test.{NAMESPACE}.svc" in command
    [target] = rendered.find_all("ReplicaSet")
    labels = target["spec"]["template"]["metadata"]["labels"]
    service, policy = (rendered.find_one(kind, "moejob-operator-test") for kind in ("Service", "NetworkPolicy"))
    assert {port["port"] for port in service["spec"]["ports"]} == {OPEN_PORT, CLOSED_PORT}
    assert policy["spec"]["ingress"] == [{"ports": [{"port": OPEN_PORT, "protocol": "TCP"}]}]
    for selector in (service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"]):
        assert selector.items() <= labels.items()
        assert not selector.items() <= rendered.pod["metadata"]["labels"].items()
    restricted = target["spec"]["template"]["spec"]["securityContext"]
    assert restricted == rendered.find_one("Pod")["spec"]["securityContext"]


def test_cert_manager_makes_the_certificate_where_it_is_asked_to(helm: Helm) -> None:
    rendered = helm.render(CERT_MANAGER)
    certificate, hooks = rendered.find_one("Certificate"), rendered.find_one("ValidatingWebhookConfiguration")
    assert hooks["metadata"]["annotations"] == {
        "cert-manager.io/inject-ca-from": f"{NAMESPACE}/{certificate['metadata']['name']}"
    }
    assert certificate["spec"]["issuerRef"]["name"] == rendered.find_one("Issuer")["metadata"]["name"]
    assert rendered.find_all("Secret") == []
    assert "validatingwebhookconfigurations" not in resources(rendered.find_one("ClusterRole", "moejob-operator"))


def test_an_issuer_that_is_there_is_used_and_none_is_made(helm: Helm) -> None:
    webhook = {"certificates": "CertManager", "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}
    rendered = helm.render({"webhook": webhook})
    assert rendered.find_one("Certificate")["spec"]["issuerRef"] == {"name": "ca", "kind": "ClusterIssuer"}
    assert rendered.find_all("Issuer") == []


@VALUES
def test_helm_never_says_whom_the_webhook_trusts(helm: Helm, values: Values) -> None:
    """It would take back at every upgrade what the leader has written."""
    rendered = helm.render(values)
    for hooks in rendered.find_all("ValidatingWebhookConfiguration"):
        assert all("caBundle" not in hook["clientConfig"] for hook in hooks["webhooks"])
    for kept in (*rendered.find_all("Secret"), *rendered.find_all("Lease")):
        assert not {"data", "stringData", "spec"} & kept.keys()


@pytest.mark.parametrize(
    ("values", "policy", "reviewed"),
    [
        pytest.param({}, "Fail", None, id="all namespaces"),
        pytest.param(
            {"serveOwnNamespace": True}, "Fail", ("NotIn", [NAMESPACE]), id="but not where the operator runs and serves"
        ),
        pytest.param(
            {"namespaces": ["a", NAMESPACE], **CERT_MANAGER},
            "Fail",
            ("In", ["a", NAMESPACE]),
            id="those that are named",
        ),
        pytest.param({"webhook": {"failurePolicy": "Ignore"}}, "Ignore", None, id="unseen"),
    ],
)
def test_a_job_that_no_replica_has_seen_is_refused_unless_asked_otherwise(
    helm: Helm, values: Values, policy: str, reviewed: tuple[str, list[str]] | None
) -> None:
    rendered = helm.render(values)
    [hook] = rendered.find_one("ValidatingWebhookConfiguration")["webhooks"]
    assert hook["failurePolicy"] == policy
    if reviewed is None:
        assert "namespaceSelector" not in hook
    else:
        [term] = hook["namespaceSelector"]["matchExpressions"]
        assert (term["key"], term["operator"], term["values"]) == ("kubernetes.io/metadata.name", *reviewed)
    [tried] = [word for word in rendered.find_one("Pod")["spec"]["containers"][0]["command"] if "--namespace=" in word]
    assert tried == f"--namespace={values.get('namespaces', ['default'])[0]}"


@VALUES
def test_all_that_only_the_test_may_do_goes_when_the_test_is_over(helm: Helm, values: Values) -> None:
    hooks = [found for found in helm.render(values).objects if "test" in found["metadata"]["name"]]
    target = {"ReplicaSet", "Service", "NetworkPolicy"} if "enabled" not in values.get("networkPolicy", {}) else set()
    assert {"Pod", "Role", "RoleBinding", "ServiceAccount"} | target == {found["kind"] for found in hooks}
    for found in hooks:
        annotations = found["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "test"
        if found["kind"] != "Pod":
            assert {"hook-succeeded", "hook-failed"} <= set(annotations["helm.sh/hook-delete-policy"].split(","))


def _limits(rendered: RenderedChart, kind: str) -> Object:
    """The policy of the limits or its binding, beside those of the rules."""
    [found] = [each for each in rendered.find_all(kind) if each["metadata"]["name"].endswith("-limits")]
    return found
