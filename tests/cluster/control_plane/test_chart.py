"""The chart's whole life with Helm on a real control plane: install, test, upgrade, rollback, uninstall, again."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import CHART, HelmError, Values
from cluster.control_plane.api import RefusedError
from cluster.control_plane.jobs import body, path
from cluster.control_plane.operators import SERVES_ITS_OWN, Home, Operator
from cluster.control_plane.plane import ControlPlane, KubectlError
from cluster.control_plane.plane import control_plane as running_control_plane
from cluster.control_plane.releases import (
    DEFINITION,
    DEFINITIONS,
    HOOKS,
    SECONDS,
    Release,
    changed_chart,
    fields_of,
    pack_chart,
    release,
    said_by_helm_test,
)
from cluster.control_plane.stand_ins import definition
from cluster.waiting import until
from limit_cases import (
    ALLOWED,
    BEYOND,
    OPEN_KEYS,
    REFUSED_BY_DEFAULT,
    RESERVED_BY_DEFAULT,
    WAYS_ROUND,
    WITHIN,
    LimitCase,
)
from moejob_operator.admission.certificates import make_pair, utc_now
from network_fragments import CLOSED, FRAGMENTS

pytestmark = pytest.mark.cluster

JOB: dict[str, Any] = {"parallelism": {"tensor": 4, "expert": 4}, "resources": {"gpusPerNode": 8, "gpuType": "H100"}}
# With a webhook an operator for some namespaces needs cert-manager.
UNREVIEWED: Values = {"webhook": {"enabled": False}}
FIELD = "somethingNew"
LEASE = "coordination.k8s.io/v1:leases/moejob-operator"


@pytest.fixture(scope="module")
def plane(programs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of our own: the definition on the shared one belongs to all its tests."""
    with running_control_plane(tmp_path_factory.mktemp("chart"), programs, nodes=2) as found:
        yield found


@pytest.fixture
def installed(plane: ControlPlane, tmp_path: Path) -> Iterator[Release]:
    """A release with all defaults."""
    with release(plane, tmp_path) as found:
        found.install()
        yield found


@contextmanager
def running(home: Home) -> Iterator[Operator]:
    """One replica of what is installed, leading."""
    operator = home.replica()
    operator.start()
    try:
        until(lambda: operator.leads and operator.is_ready, waiting_for=home.tails)
        yield operator
    finally:
        operator.process.stop()


def create_job(plane: ControlPlane, namespace: str, name: str = "job", **sections: Any) -> None:
    def is_created() -> bool:
        try:
            plane.api.create(path(namespace), body(name, **JOB, **sections))
        except RefusedError as refused:
            # A definition that was just created is served a moment later.
            return refused.reason == "AlreadyExists"
        return True

    until(is_created, waiting_for="jobs to be served")


def trainers(plane: ControlPlane, namespace: str) -> dict[str, str]:
    """UIDs of a namespace's trainer pods, by name."""
    query = "labelSelector=moejob.dev/role=trainer"
    listed = plane.api.get(f"/api/v1/namespaces/{namespace}/pods?{query}")["items"]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in listed}


def bundle(plane: ControlPlane, name: str = "moejob") -> str:
    """Whom the API server trusts about the webhook."""
    trusted: str = plane.api.get(f"{HOOKS}/{name}")["webhooks"][0]["clientConfig"].get("caBundle", "")
    return trusted


def certificate(found: Release) -> dict[str, str]:
    data: dict[str, str] = found.get("secrets/moejob-webhook-certificate").get("data", {})
    return data


# --- install --------------------------------------------------------------------------------------------------------


def test_what_is_installed_runs_apart_and_passes_as_restricted(installed: Release) -> None:
    pods = installed.get("pods")["items"]
    assert len(pods) == 2
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    assert installed.get("apps/v1:deployments/moejob-operator")["status"]["readyReplicas"] == 2


def test_jobs_are_served_with_the_rights_that_were_installed(installed: Release) -> None:
    home = installed.home
    with running(home):
        create_job(installed.plane, installed.namespace)
        until(lambda: len(trainers(installed.plane, installed.namespace)) == 2, waiting_for=home.tails)
        assert base64.b64decode(bundle(installed.plane)) == base64.b64decode(certificate(installed)["ca.crt"])


def test_a_packed_chart_installs_what_the_tree_does_and_serves_jobs(plane: ControlPlane, tmp_path: Path) -> None:
    with release(plane, tmp_path) as packed:
        packed.install(chart=pack_chart(plane, tmp_path))
        assert packed.get("apps/v1:deployments/moejob-operator")["status"]["readyReplicas"] == 2
        home = packed.home
        of_the_tree = plane.helm.render(SERVES_ITS_OWN, packed.namespace).objects
        for kind in ("Deployment", "ClusterRole", "CustomResourceDefinition"):
            of_kind = [found for found in of_the_tree if found["kind"] == kind]
            assert of_kind
            assert home.chart.find_all(kind) == of_kind
        with running(home):
            create_job(plane, packed.namespace)
            until(lambda: len(trainers(plane, packed.namespace)) == 2, waiting_for=home.tails)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"networkPolicy": {"egress": True, "jobsEgress": True}, "limits": ALLOWED}, id="closed"),
        pytest.param({"metrics": {"dashboard": {"enabled": True}}, "podLabels": {"a": "b"}}, id="with a dashboard"),
    ],
)
def test_the_api_server_knows_every_field_of_what_is_rendered(
    plane: ControlPlane, tmp_path: Path, values: Values
) -> None:
    with release(plane, tmp_path) as empty:
        # The pod of `helm test` needs its account first; other tests create both.
        objects = [found for found in plane.helm.render(values, empty.namespace).objects if found["kind"] != "Pod"]
        assert len(objects) > 15
        rendered = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": objects})
        assert try_strictly(plane, rendered).count("created (server dry run)") == len(objects)
        misspelt = rendered.replace("revisionHistoryLimit", "revisionHistoryLimits")
        with pytest.raises(KubectlError, match='unknown field "revisionHistoryLimits"'):
            try_strictly(plane, misspelt)


def try_strictly(plane: ControlPlane, manifests: str) -> str:
    """Return what is said of manifests that would be created; a field that the API server does not know is refused."""
    return plane.kubectl("create", "--dry-run=server", "--validate=strict", "--filename=-", stdin=manifests)


def test_an_operator_that_would_serve_the_same_jobs_is_refused(installed: Release, tmp_path: Path) -> None:
    with release(installed.plane, tmp_path) as second:
        with pytest.raises(HelmError, match="invalid ownership metadata"):
            second.install()
        # Nor does it help to leave the definition to the first.
        with pytest.raises(HelmError, match="moejob-operator"):
            second.install({"crd": {"install": False}})


def test_each_of_two_operators_serves_its_own_namespaces_and_no_third_takes_one_of_them(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with release(plane, tmp_path) as first, release(plane, tmp_path) as second, release(plane, tmp_path) as third:
        first.install({**UNREVIEWED, "namespaces": [first.namespace]})
        elsewhere: Values = {**UNREVIEWED, "crd": {"install": False}}
        second.install({"namespaces": [second.namespace, third.namespace], **elsewhere})
        with pytest.raises(HelmError, match="invalid ownership metadata"):
            third.install({"namespaces": [third.namespace], **elsewhere})
        for each in (first, second, third):
            create_job(plane, each.namespace)
        home = second.home
        with running(home):
            for namespace in (second.namespace, third.namespace):
                until(lambda: len(trainers(plane, namespace)) == 2, waiting_for=home.tails)  # noqa: B023
            assert trainers(plane, first.namespace) == {}


# --- helm test ------------------------------------------------------------------------------------------------------


def test_helm_test_says_what_is_well_and_that_a_webhook_is_not_reached(installed: Release) -> None:
    """Here nothing leads from a Service to a process."""
    with running(installed.home) as operator:
        said = said_by_helm_test(installed, f"http://127.0.0.1:{operator.port}")
    assert "ok: the operator is ready\nok: a replica leads\n" in said
    assert "NOT so: a job that can work is accepted: " in said
    assert 'failed calling webhook "validate.moejob.dev"' in said
    assert "failed" in said


def test_helm_test_succeeds_when_the_webhook_is_reached_and_leaves_no_rights_behind(installed: Release) -> None:
    plane, home = installed.plane, installed.home
    with running(home) as operator:
        lead_to(operator, installed)
        said = said_by_helm_test(installed, f"http://127.0.0.1:{operator.port}")
        create_job(plane, "default", "seen")
    assert "NOT so" not in said
    assert "ok: a job that cannot work is denied" in said
    assert "Succeeded" in said
    left = {name for name in installed.remains() if name.endswith("-test") or "test-" in name}
    assert left == {"pod/moejob-operator-test"}
    assert plane.kubectl("get", "mtj", "--all-namespaces", "--output=name") == "moetrainingjob.moejob.dev/seen\n"
    # No replica runs any more.
    with pytest.raises(RefusedError, match="failed calling webhook"):
        plane.api.create(path("default"), body("unseen", **JOB))
    with pytest.raises(RefusedError, match="failed calling webhook"):
        plane.api.merge(path("default", "seen"), {"spec": {"lifecycle": {"suspend": True}}})
    plane.kubectl("label", "mtj", "seen", "--namespace=default", "team=a")
    plane.kubectl("delete", "mtj", "seen", "--namespace=default", "--cascade=foreground", f"--timeout={SECONDS}s")


def lead_to(operator: Operator, installed: Release) -> None:
    """Let the webhook's Service lead to this machine. As Helm, so that it is Helm's to take back."""
    to_here = '{"spec": {"type": "ExternalName", "externalName": "localhost", "clusterIP": null, "clusterIPs": null}}'
    at = (f"--namespace={installed.namespace}", "--field-manager=helm")
    installed.plane.kubectl("patch", "service", "moejob-webhook", *at, "--type=merge", f"--patch={to_here}")
    port = f'[{{"op": "replace", "path": "/webhooks/0/clientConfig/service/port", "value": {operator.webhook_port}}}]'
    installed.plane.kubectl("patch", "validatingwebhookconfiguration", "moejob", *at, "--type=json", f"--patch={port}")


def test_with_cert_manager_its_certificate_is_served_and_the_operator_makes_none(
    plane: ControlPlane, tmp_path: Path
) -> None:
    for kind in ("Certificate", "Issuer"):
        plane.api.create(DEFINITIONS, definition("cert-manager.io/v1", kind))
    with release(plane, tmp_path) as found:
        until(lambda: is_installed(found), waiting_for="kinds of cert-manager to be known")
        pair = make_pair(
            tuple(found.get("cert-manager.io/v1:certificates/moejob-webhook-certificate")["spec"]["dnsNames"]),
            utc_now(),
        )
        data = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": pair.authority}
        encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
        secret = {"metadata": {"name": "moejob-webhook-certificate"}, "type": "kubernetes.io/tls", "data": encoded}
        plane.api.create(f"/api/v1/namespaces/{found.namespace}/secrets", secret)
        trust = f'[{{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": "{encoded["ca.crt"]}"}}]'
        plane.kubectl("patch", "validatingwebhookconfiguration", "moejob", "--type=json", f"--patch={trust}")
        with running(found.home) as operator:
            lead_to(operator, found)
            assert "ok: a job that cannot work is denied" in said_by_helm_test(
                found, f"http://127.0.0.1:{operator.port}"
            )
        assert certificate(found) == encoded
        assert bundle(plane) == encoded["ca.crt"]


def is_installed(found: Release) -> bool:
    try:
        found.install({"webhook": {"certificates": "CertManager"}})
    except HelmError as refused:
        if "no matches for kind" in str(refused):
            return False
        raise
    return True


# --- limits ---------------------------------------------------------------------------------------------------------


def test_the_api_server_tells_jobs_within_the_limits_from_those_beyond_without_an_operator(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with release(plane, tmp_path) as found:
        found.install({"webhook": {"enabled": False}, "limits": ALLOWED})
        tried = path(found.namespace, is_tried_only=True)
        until(lambda: refusal(plane, tried, BEYOND[0]), waiting_for="the policy to be in force")
        assert {case.id: refusal(plane, tried, case) for case in WITHIN} == {case.id: "" for case in WITHIN}
        for case in BEYOND:
            said = refusal(plane, tried, case)
            assert case.says in said, case.id
            assert "ValidatingAdmissionPolicy 'moejob-limits'" in said, case.id


def test_the_api_server_knows_the_other_words_for_what_a_limit_forbids(plane: ControlPlane, tmp_path: Path) -> None:
    with release(plane, tmp_path) as found:
        found.install({"webhook": {"enabled": False}, "limits": OPEN_KEYS})
        tried = path(found.namespace, is_tried_only=True)
        until(lambda: refusal(plane, tried, WAYS_ROUND[0]), waiting_for="the policy to be in force")
        missed = {case.id: said for case in WAYS_ROUND if case.says not in (said := refusal(plane, tried, case))}
        assert missed == {}


def test_the_api_server_takes_the_networks_of_clouds_within_the_limits_that_each_names_only(
    plane: ControlPlane, tmp_path: Path
) -> None:
    cases = {fragment.name: LimitCase(fragment.name, fragment.sections) for fragment in FRAGMENTS}
    with release(plane, tmp_path) as found:
        found.install({"webhook": {"enabled": False}, "limits": CLOSED})
        tried = path(found.namespace, is_tried_only=True)
        until(lambda: all(refusal(plane, tried, case) for case in cases.values()), waiting_for="the policy")
        for case in cases.values():
            assert "ValidatingAdmissionPolicy 'moejob-limits'" in refusal(plane, tried, case)
        for fragment in FRAGMENTS:
            found.upgrade(CHART, {"webhook": {"enabled": False}, "limits": fragment.limits})
            case = cases[fragment.name]
            until(lambda: not refusal(plane, tried, case), waiting_for=lambda: refusal(plane, tried, case))  # noqa: B023


def test_the_api_server_refuses_jobs_without_a_queue_where_each_needs_one(plane: ControlPlane, tmp_path: Path) -> None:
    with release(plane, tmp_path) as found:
        found.install({"webhook": {"enabled": False}, "limits": {"requireQueue": True}})
        tried = path(found.namespace, is_tried_only=True)
        until(lambda: refusal(plane, tried, LimitCase("no queue")), waiting_for="the policy to be in force")
        assert "limits.requireQueue" in refusal(plane, tried, LimitCase("no queue"))
        assert refusal(plane, tried, LimitCase("a queue", {"lifecycle": {"queue": "team"}})) == ""


def test_the_api_server_refuses_jobs_where_the_operator_does_not_serve(plane: ControlPlane, tmp_path: Path) -> None:
    job = LimitCase("a job that names nothing")
    with release(plane, tmp_path) as found:
        found.install({"webhook": {"enabled": False}, "serveOwnNamespace": False})
        until(lambda: refusal(plane, path("kube-system", is_tried_only=True), job), waiting_for="the policy")
        for namespace in ("kube-system", "kube-public", found.namespace):
            said = refusal(plane, path(namespace, is_tried_only=True), job)
            assert f"jobs in the namespace {namespace} are not served here" in said
        assert refusal(plane, path("default", is_tried_only=True), job) == ""


def test_by_default_jobs_pass_but_for_reserved_keys_and_labels_without_a_prefix(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with release(plane, tmp_path) as found:
        found.install({"webhook": {"enabled": False}})
        tried = path(found.namespace, is_tried_only=True)
        until(lambda: refusal(plane, tried, BEYOND[-1]), waiting_for="the policy to be in force")
        passed = {case.id for case in BEYOND if not refusal(plane, tried, case)}
        assert passed == {case.id for case in BEYOND} - REFUSED_BY_DEFAULT
        assert [case.id for case in RESERVED_BY_DEFAULT if case.says not in refusal(plane, tried, case)] == []


def refusal(plane: ControlPlane, tried: str, case: LimitCase) -> str:
    """Return what the API server says against a job; nothing when it is allowed."""
    try:
        plane.api.create(tried, body(**case.sections))
    except RefusedError as refused:
        return refused.message
    return ""


# --- upgrade and rollback -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server_side", ["true", "false"])
def test_an_upgrade_takes_the_definition_along_and_leaves_alone_what_the_leader_wrote(
    plane: ControlPlane, tmp_path: Path, server_side: str
) -> None:
    """Helm 3 knows only the other way, in which the client merges."""
    flag = f"--server-side={server_side}"
    with release(plane, tmp_path) as installed:
        installed.install({}, flag)
        with running(installed.home) as operator:
            create_job(plane, installed.namespace)
            until(lambda: len(trainers(plane, installed.namespace)) == 2, waiting_for="its pods")
            before = (bundle(plane), certificate(installed), trainers(plane, installed.namespace))
            holder = installed.get(LEASE)["spec"]["holderIdentity"]
            assert all(before)
            next_version = changed_chart(tmp_path, "9.9.9", new_field=FIELD)
            installed.upgrade(next_version, {"webhook": {"timeoutSeconds": 7}}, flag)
            assert (bundle(plane), certificate(installed), trainers(plane, installed.namespace)) == before
            assert installed.get(LEASE)["spec"]["holderIdentity"] == holder
            assert operator.leads
        assert all(FIELD in fields for fields in fields_of(plane.api.get(DEFINITION)))
        assert plane.api.get(f"{HOOKS}/moejob")["webhooks"][0]["timeoutSeconds"] == 7
        [container] = installed.get("apps/v1:deployments/moejob-operator")["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "moejob-operator:9.9.9"


def test_a_rollback_brings_back_all_of_the_version_before(installed: Release) -> None:
    plane = installed.plane
    with running(installed.home):
        trusted = until(lambda: bundle(plane), waiting_for="the authority")
    create_job(plane, installed.namespace)
    installed.upgrade(changed_chart(installed.folder, "9.9.9", new_field=FIELD))
    installed.helm("rollback", "1")
    assert not any(FIELD in fields for fields in fields_of(plane.api.get(DEFINITION)))
    assert bundle(plane) == trusted
    assert certificate(installed)["tls.crt"]
    assert plane.api.get(path(installed.namespace, "job"))["spec"]["method"] == "SFT"


def test_a_definition_that_came_by_kubectl_is_taken_over_when_asked_to(plane: ControlPlane, tmp_path: Path) -> None:
    older = changed_chart(tmp_path, "0.0.9", new_field=FIELD) / "files" / "moetrainingjobs.yaml"
    plane.kubectl("apply", "--server-side=false", "-f", older)
    with release(plane, tmp_path) as found:
        with pytest.raises(HelmError, match="invalid ownership metadata"):
            found.install()
        found.install({}, "--take-ownership", "--force-conflicts")
        assert not any(FIELD in fields for fields in fields_of(plane.api.get(DEFINITION)))


def test_other_namespaces_can_be_served_from_the_next_upgrade_on(installed: Release) -> None:
    plane = installed.plane
    with running(installed.home):
        until(lambda: bundle(plane), waiting_for="the authority")
    installed.upgrade(CHART, {**UNREVIEWED, "namespaces": [installed.namespace]})
    home = installed.home
    with running(home):
        create_job(plane, installed.namespace)
        until(lambda: len(trainers(plane, installed.namespace)) == 2, waiting_for=home.tails)
    with pytest.raises(RefusedError, match="not found"):
        bundle(plane)


def test_a_failed_upgrade_leaves_the_replicas_that_work(installed: Release) -> None:
    plane = installed.plane
    before = {pod["metadata"]["name"] for pod in installed.get("pods")["items"]}
    # What no node can hold stands for a version that does not start.
    too_much: Values = {"resources": {"requests": {"cpu": "1000"}}}
    with pytest.raises(HelmError):
        installed.upgrade(CHART, too_much, "--timeout=3s")
    now = {pod["metadata"]["name"]: pod["status"]["phase"] for pod in installed.get("pods")["items"]}
    assert before <= {name for name, phase in now.items() if phase == "Running"}
    installed.helm("rollback", "1")
    assert installed.get("apps/v1:deployments/moejob-operator")["status"]["readyReplicas"] == 2
    assert plane.has_service_account(installed.namespace)


# --- uninstall ------------------------------------------------------------------------------------------------------


def test_an_uninstall_keeps_jobs_and_their_pods_and_nothing_else_and_the_next_install_goes_on(
    installed: Release,
) -> None:
    plane, namespace, home = installed.plane, installed.namespace, installed.home
    with running(home):
        create_job(plane, namespace)
        until(lambda: len(trainers(plane, namespace)) == 2, waiting_for=home.tails)
    pods = trainers(plane, namespace)
    installed.helm("uninstall")
    kinds = ("moetrainingjobs", "moetrainingprofiles", "clustermoetrainingprofiles")
    definitions = {f"customresourcedefinition.apiextensions.k8s.io/{kind}.moejob.dev" for kind in kinds}
    until(lambda: installed.remains() == definitions, waiting_for=lambda: f"the end of {installed.remains()}")
    for leftover in (LEASE, "secrets/moejob-webhook-certificate"):
        with pytest.raises(RefusedError, match="not found"):
            installed.get(leftover)
    assert trainers(plane, namespace) == pods
    installed.install()
    home = installed.home
    with running(home):
        create_job(plane, namespace, "another")
        until(lambda: len(trainers(plane, namespace)) == 4, waiting_for=home.tails)
        assert pods.items() <= trainers(plane, namespace).items()


def test_without_keep_an_uninstall_takes_jobs_along_and_nothing_sticks(plane: ControlPlane, tmp_path: Path) -> None:
    with release(plane, tmp_path) as found:
        found.install({"crd": {"keep": False}})
        home = found.home
        with running(home):
            create_job(plane, found.namespace, "early")
            until(lambda: len(trainers(plane, found.namespace)) == 2, waiting_for=home.tails)
            plane.kubectl("delete", "moetrainingjob", "early", f"--namespace={found.namespace}")
            # The garbage collector learns every half minute which kinds there are; of one that went before, never.
            until(lambda: not trainers(plane, found.namespace), waiting_for="a collector that knows jobs")
            create_job(plane, found.namespace)
            until(lambda: len(trainers(plane, found.namespace)) == 2, waiting_for=home.tails)
        found.helm("uninstall")
        until(lambda: not found.remains(), waiting_for=lambda: f"the end of {found.remains()}")
        until(lambda: not trainers(plane, found.namespace), waiting_for="the end of the pods")


def test_an_operator_that_is_uninstalled_while_it_runs_ends_none_of_its_jobs(installed: Release) -> None:
    plane, namespace, home = installed.plane, installed.namespace, installed.home
    with running(home) as operator:
        create_job(plane, namespace)
        until(lambda: len(trainers(plane, namespace)) == 2, waiting_for=home.tails)
        pods = trainers(plane, namespace)
        installed.helm("uninstall")
        until(lambda: not operator.leads, waiting_for=home.tails)
        assert trainers(plane, namespace) == pods


# --- people ---------------------------------------------------------------------------------------------------------


def test_who_may_edit_a_namespace_may_train_there(installed: Release) -> None:
    plane, namespace = installed.plane, installed.namespace
    for role in ("edit", "view"):
        plane.kubectl(
            "create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}", f"--namespace={namespace}"
        )

    def may(role: str, verb: str) -> bool:
        asked = ("auth", "can-i", verb, "moetrainingjobs.moejob.dev", f"--as={role}", f"--namespace={namespace}")
        try:
            return plane.kubectl(*asked).strip() == "yes"
        except KubectlError:
            return False

    # The controller manager gathers roles a moment later.
    until(lambda: may("edit", "get"), waiting_for="the role edit to include jobs")
    assert all(may("edit", verb) for verb in ("create", "update", "patch", "delete"))
    until(lambda: may("view", "get"), waiting_for="the role view to include jobs")
    assert not any(may("view", verb) for verb in ("create", "update", "patch", "delete"))
