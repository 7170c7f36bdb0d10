"""The table of tokens in docs/operator.md: each of its sentences is held against the rights that the chart gives.

A sentence that is new or says something else has no check here, and fails until it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import yaml

from charts import CHART, NAMESPACE, Helm, Object, RenderedChart

PAGE = CHART.parents[1] / "docs" / "operator.md"
PODS = CHART.parents[1] / "tests" / "operator" / "golden"
ACCOUNT = "moejob-operator"
TEST_ACCOUNT = "moejob-operator-test"
SOME = {"namespaces": ["team-a", "team-b"], "webhook": {"certificates": "CertManager"}}
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
READING = {"get", "list", "watch"}
JOBS, STATUS, WEBHOOKS = "moetrainingjobs", "moetrainingjobs/status", "validatingwebhookconfigurations"
PROFILES, CLUSTER_PROFILES = "moetrainingprofiles", "clustermoetrainingprofiles"


@dataclass(frozen=True, slots=True)
class Right:
    """One verb on one resource, in a namespace or everywhere, by name or not."""

    namespace: str | None
    resource: str
    verb: str
    name: str | None = None


class Chart:
    """The chart with each set of values that the table knows."""

    def __init__(self, helm: Helm) -> None:
        self.everywhere, self.somewhere = helm.render(), helm.render(SOME)
        self.watched = helm.render({"networkPolicy": {"metricsFrom": [PROMETHEUS]}})


def rights(rendered: RenderedChart, account: str) -> set[Right]:
    """All rights that bindings give an account."""
    return {right for binding in bindings(rendered, account) for right in bound(rendered, binding)}


def bindings(rendered: RenderedChart, account: str) -> Iterator[Object]:
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        yield from (one for one in rendered.find_all(kind) if account in {who["name"] for who in one["subjects"]})


def bound(rendered: RenderedChart, binding: Object) -> Iterator[Right]:
    about = binding["roleRef"]
    namespace = binding["metadata"].get("namespace")
    [role] = [
        one
        for one in rendered.find_all(about["kind"])
        if one["metadata"]["name"] == about["name"]
        and (about["kind"] == "ClusterRole" or one["metadata"]["namespace"] == namespace)
    ]
    yield from of_role(role, namespace)


def of_role(role: Object, namespace: str | None = None) -> Iterator[Right]:
    for rule in role["rules"]:
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                yield from (Right(namespace, resource, verb, name) for name in rule.get("resourceNames", [None]))


def may(found: set[Right], resource: str, verbs: set[str]) -> bool:
    """Return whether these verbs on a resource are among rights without names, wherever they are."""
    return verbs <= {right.verb for right in found if right.resource == resource and right.name is None}


def operators(chart: Chart) -> set[Right]:
    return rights(chart.everywhere, ACCOUNT)


def user_role(chart: Chart, name: str) -> Object:
    """A role that the cluster adds to its own of this name."""
    role = chart.everywhere.find_one("ClusterRole", f"moejob-{name}")
    assert role["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{name}"] == "true"
    return role


# --- sentences --------------------------------------------------------------------------------------------------------


def creates_pods(chart: Chart) -> bool:
    namespaces = {right.namespace for right in rights(chart.somewhere, ACCOUNT) if right.resource == "pods"}
    return may(operators(chart), "pods", {"create"}) and namespaces == {"team-a", "team-b"}


def deletes_and_writes_status(chart: Chart) -> bool:
    found = operators(chart)
    return may(found, JOBS, {"delete"}) and may(found, "pods", {"delete"}) and may(found, STATUS, {"update"})


def patches_its_webhook_where_it_serves_all(chart: Chart) -> bool:
    named = {(right.verb, right.name) for right in operators(chart) if right.resource == WEBHOOKS}
    elsewhere = {right.resource for right in rights(chart.somewhere, ACCOUNT)}
    [configuration] = chart.everywhere.find_all("ValidatingWebhookConfiguration")
    return named == {(verb, configuration["metadata"]["name"]) for verb in ("get", "patch")} and (
        WEBHOOKS not in elsewhere
    )


def reads_one_secret_and_no_role(chart: Chart) -> bool:
    secrets = {right for right in operators(chart) if right.resource == "secrets" and right.verb != "create"}
    is_of_roles = {right.resource for right in operators(chart)} & {
        f"{scope}role{kind}" for scope in ("", "cluster") for kind in ("s", "bindings")
    }
    beyond = {"nodes", CLUSTER_PROFILES}
    nodes = {right.verb for right in operators(chart) if right.resource in {*beyond, PROFILES}}
    served = {right.namespace for right in rights(chart.somewhere, ACCOUNT) if right.resource not in beyond}
    return (
        {(right.namespace, right.name) for right in secrets} == {(NAMESPACE, "moejob-webhook-certificate")}
        and not is_of_roles
        and nodes == {"get"}
        and served == {"team-a", "team-b", NAMESPACE}
    )


def edits_jobs(chart: Chart) -> bool:
    found = set(of_role(user_role(chart, "edit")))
    return all(may(found, resource, {"create", "update", "patch", "delete"}) for resource in (JOBS, PROFILES))


def edits_no_status(chart: Chart) -> bool:
    return {right.resource for right in of_role(user_role(chart, "edit"))} == {JOBS, PROFILES}


def views_jobs(chart: Chart) -> bool:
    found = set(of_role(user_role(chart, "view")))
    return all(may(found, resource, READING) for resource in (JOBS, PROFILES))


def views_alone(chart: Chart) -> bool:
    found = set(of_role(user_role(chart, "view")))
    resources = {JOBS, STATUS, PROFILES, CLUSTER_PROFILES}
    return {right.resource for right in found} == resources and {right.verb for right in found} == READING


def alone_writes_status(chart: Chart) -> bool:
    roles = [*chart.everywhere.find_all("ClusterRole"), *chart.everywhere.find_all("Role")]
    writers = {
        role["metadata"]["name"]
        for role in roles
        for right in of_role(role)
        if right.resource == STATUS and right.verb not in READING
    }
    return writers == {ACCOUNT}


def pods_get_no_token(_: Chart) -> bool:
    files = [yaml.safe_load_all(path.read_text()) for path in PODS.glob("*.yaml")]
    specs = [one["spec"] for file in files for one in file if one["kind"] == "Pod"]
    return len(specs) > 1 and all(spec["automountServiceAccountToken"] is False for spec in specs)


def tests_create_jobs_and_read_the_lease(chart: Chart) -> bool:
    roles = [role for role in chart.everywhere.find_all("Role") if role["metadata"]["name"].startswith(TEST_ACCOUNT)]
    policies = {role["metadata"]["annotations"]["helm.sh/hook-delete-policy"] for role in roles}
    return rights(chart.everywhere, TEST_ACCOUNT) == {
        Right("default", JOBS, "create"),
        Right(NAMESPACE, "leases", "get", "moejob-operator"),
    } and policies == {"before-hook-creation,hook-succeeded,hook-failed"}


def metrics_are_for_those_that_are_named(chart: Chart) -> bool:
    """All may connect where none is named; else they and the pod of `helm test`."""
    test = {"podSelector": {"matchLabels": chart.everywhere.find_one("Pod")["metadata"]["labels"]}}
    return "from" not in metrics_rule(chart.everywhere) and [
        peer for peer in metrics_rule(chart.watched)["from"] if not is_selected(peer, test)
    ] == [PROMETHEUS]


def is_selected(peer: Object, pod: Object) -> bool:
    wanted, labels = (one.get("podSelector", {}).get("matchLabels", {}).items() for one in (peer, pod))
    return "namespaceSelector" not in peer and wanted <= labels


def metrics_rule(rendered: RenderedChart) -> Object:
    rules = rendered.find_one("NetworkPolicy", "moejob-operator")["spec"]["ingress"]
    [rule] = [one for one in rules if {"http"} == {port["port"] for port in one["ports"]}]
    found: Object = rule
    return found


Check = Callable[[Chart], bool]
# By the beginning of a row and its column: the beginnings of all of its sentences. None: of no right of the chart.
SAID: dict[tuple[str, int], dict[str, Check | None]] = {
    ("the operator", 1): {
        "Create pods in every namespace that it serves": creates_pods,
        "Delete jobs and pods, write any status": deletes_and_writes_status,
        "Where it serves all namespaces, and without cert-manager, patch": patches_its_webhook_where_it_serves_all,
    },
    ("the operator", 2): {
        "Read a Secret but its certificate by a request, change roles, act in namespaces that it does not serve; "
        "`nodes` and profiles it only reads": reads_one_secret_and_no_role
    },
    ("a user with the role `edit`", 1): {"Create, change and delete jobs and profiles there": edits_jobs},
    ("a user with the role `edit`", 2): {"Write a status": edits_no_status},
    ("a user who may only create jobs", 1): {"The same": None},
    ("a user who may only create jobs", 2): {"Read logs, pods or Secrets by a request": None},
    ("a user with the role `view`", 1): {
        "Read jobs and profiles, the values in `resources.env` among them": views_jobs
    },
    ("a user with the role `view`", 2): {"Read Secrets, change anything": views_alone},
    ("a user who may write `moetrainingjobs/status`", 1): {
        "Make the operator skip the check of a job, change its count of attempts or end it; no role of the chart has "
        "this right but the operator's": alone_writes_status
    },
    ("a user who may write `moetrainingjobs/status`", 2): {},
    ("a pod of a job", 1): {"Nothing: it gets no token": pods_get_no_token},
    ("a pod of a job", 2): {},
    ("the pod of `helm test`", 1): {
        "Create jobs in one namespace and read the Lease": tests_create_jobs_and_read_the_lease
    },
    ("the pod of `helm test`", 2): {},
    ("a replica's metrics", 1): {
        "Need none: `networkPolicy.metricsFrom` says who may connect": metrics_are_for_those_that_are_named
    },
    ("a replica's metrics", 2): {},
}


@cache
def table() -> tuple[tuple[str, ...], ...]:
    section = PAGE.read_text().partition("## Tokens and what they open\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return tuple(tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[1:])


def sentences(cell: str) -> list[str]:
    return [one for one in cell.removesuffix(".").split(". ") if one]


@pytest.fixture(scope="module")
def chart(helm: Helm) -> Chart:
    return Chart(helm)


@pytest.mark.parametrize("place", [*SAID], ids=lambda place: f"{place[0]} {place[1]}")
def test_what_the_page_says_of_a_token_is_what_the_chart_gives(chart: Chart, place: tuple[str, int]) -> None:
    [row] = [row for row in table() if row[0].startswith(place[0])]
    said, checks = sentences(row[place[1]]), SAID[place]
    assert len(said) == len(checks)
    for sentence, (begins, check) in zip(said, checks.items(), strict=True):
        assert sentence.startswith(begins)
        assert check is None or check(chart), sentence


def test_every_row_of_the_page_is_held_against_the_chart() -> None:
    assert len(table()) == len(SAID) / 2
