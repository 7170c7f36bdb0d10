"""The chart's settings of the operator are those that it understands, and agree with the rest of the chart."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from charts import CHART, NAMESPACE, Helm, RenderedChart, Values
from limit_cases import ALLOWED
from moejob_api.contract.pods import MANAGED_BY, Label, PodPort
from moejob_api.job.resources import GpuType
from moejob_api.rules.limits import JobLimits
from moejob_operator.admission import review
from moejob_operator.admission.certificates import service_hosts
from moejob_operator.children.shared import OPERATOR_LABELS
from moejob_operator.runtime import lifecycle
from moejob_operator.runtime.leader_election import LeaseDurations
from moejob_operator.runtime.settings import Settings

Told = Callable[[Values], tuple[Settings, RenderedChart]]
PREFIX = "MOEJOB_OPERATOR_"
# What the chart decides by values of its own, or that only a process by itself needs.
DECIDED = {
    *{"namespaces", "kubeconfig", "own_namespace", "identity", "trainer_image", "rollout_image", "http_port"},
    "trainer_colocated_image",
    *{"leader_election", "lease_name", "lease_seconds", "renew_deadline_seconds", "retry_seconds"},
    *{"webhook", "webhook_port", "webhook_service", "webhook_secret", "webhook_configuration", "webhook_certificates"},
    *{"job_network_policy", "job_metrics_from", "job_egress", "job_egress_rules", "limits", "gpu_nodes"},
}
OTHERS: dict[str, Any] = {
    "workers": 7,
    "spacingSeconds": 0.25,
    "resyncSeconds": 7200,
    "stopSeconds": 45.5,
    "requestConcurrency": 1_000_000,
    "requestSeconds": 5,
    "progressSeconds": 3,
    "logLevel": "DEBUG",
    "logFormat": "Text",
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def told(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> Told:
    """The settings of an operator that the chart starts."""

    def settings(values: Values) -> tuple[Settings, RenderedChart]:
        rendered = helm.render(values)
        unknown = {
            name for name in rendered.environment if name.removeprefix(PREFIX).lower() not in Settings.model_fields
        }
        assert not unknown
        for name, value in rendered.environment.items():
            monkeypatch.setenv(name, value)
        return Settings(own_namespace=NAMESPACE), rendered

    return settings


def test_the_operator_starts_with_what_it_is_told(told: Told) -> None:
    settings, rendered = told({"namespaces": ["team-a", "team-b"], "webhook": {"enabled": False}})
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert settings.namespaces == ("team-a", "team-b")
    assert settings.trainer_image == f"moejob-trainer:{version}"
    assert settings.trainer_colocated_image == f"moejob-trainer-colocated:{version}"
    assert settings.rollout_image == f"moejob-rollout:{version}"
    assert settings.lease_durations == LeaseDurations()
    assert rendered.container["command"] == ["python", "-m", "moejob_operator"]


def test_jobs_get_a_network_policy_unless_the_chart_is_told_otherwise(told: Told) -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    settings, rendered = told({"networkPolicy": {"metricsFrom": [prometheus]}})
    assert settings.job_network_policy
    assert settings.job_metrics_from == (prometheus,)
    assert OPERATOR_LABELS.items() <= rendered.pod["metadata"]["labels"].items()
    assert "networkpolicies" in str(rendered.find_all("ClusterRole"))
    assert not settings.job_egress
    settings, rendered = told({"networkPolicy": {"jobs": False}})
    assert not settings.job_network_policy
    assert "networkpolicies" not in str(rendered.find_all("ClusterRole"))


def test_one_value_bounds_what_pods_of_jobs_connect_to(told: Told) -> None:
    settings, _ = told({"networkPolicy": {"jobsEgress": True}})
    assert (settings.job_egress, settings.job_egress_rules) == (True, ())
    rule = {"to": [{"podSelector": {"matchLabels": {"app": "minio"}}}], "ports": [{"port": 9000}]}
    settings, _ = told({"networkPolicy": {"jobsEgress": True, "jobsEgressRules": [rule]}})
    assert settings.job_egress_rules == (rule,)


@pytest.mark.parametrize(
    "limits",
    [{}, {"secrets": []}, ALLOWED, {"reserved": []}, {"requireQueue": True}],
    ids=["none", "one", "all", "open", "a queue"],
)
def test_the_operator_holds_jobs_to_the_limits_of_the_chart(told: Told, limits: Values) -> None:
    settings, _ = told({"limits": limits})
    assert settings.job_limits == JobLimits.model_validate({**limits, "unservedNamespaces": ["kube-*", NAMESPACE]})


def test_the_table_of_gpu_types_on_the_page_is_taken_as_it_is(told: Told) -> None:
    page = (CHART.parents[1] / "docs" / "operator.md").read_text()
    [table] = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if text.startswith("gpuNodes:")]
    assert told({})[0].gpu_nodes == {}
    settings, _ = told(yaml.safe_load(table))
    assert settings.gpu_nodes[GpuType.H100] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


def test_the_recipe_for_shared_clusters_is_taken_as_it_is(told: Told) -> None:
    page = (CHART.parents[1] / "docs" / "operator.md").read_text()
    [recipe] = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if text.startswith("limits:")]
    settings, _ = told(yaml.safe_load(recipe))
    left_open = {name for name, allowed in settings.limits if allowed is None}
    assert left_open == {"storage_classes", "queues"}


def test_the_chart_bounds_limits_as_the_operator_does() -> None:
    offered = json.loads((CHART / "values.schema.json").read_text())["properties"]["limits"]["properties"]
    known = JobLimits.model_json_schema(by_alias=True)["properties"]
    assert set(offered) == set(known)
    assert offered.pop("requireQueue") == {"description": known["requireQueue"]["description"], "type": "boolean"}
    for name, bounds in offered.items():
        given = next((kind for kind in known[name].get("anyOf", ()) if kind["type"] == "array"), known[name])
        assert (bounds["description"], bounds["items"]) == (known[name]["description"], given["items"])
        assert bounds["type"] == (["array", "null"] if "anyOf" in known[name] else "array")


def test_whatever_the_operator_can_be_told_the_chart_can_tell_it(told: Told) -> None:
    settings, _ = told({"settings": OTHERS})
    expected = {_snake(name): value for name, value in OTHERS.items()}
    assert settings.model_dump(include=set(expected)) == expected
    assert settings.model_fields_set & set(expected) == set(Settings.model_fields) - DECIDED
    defaults = Settings(own_namespace=NAMESPACE, _env_prefix="NONE_").model_dump()
    assert all(defaults[name] != value for name, value in expected.items()), "a default shows nothing"


def test_the_chart_bounds_settings_as_the_operator_does() -> None:
    offered = json.loads((CHART / "values.schema.json").read_text())["properties"]
    known = Settings.model_json_schema()["properties"]
    found = {**offered["settings"]["properties"], **offered["leaderElection"]["properties"]}
    assert {_snake(name) for name in found} == {
        *(set(known) - DECIDED),
        *{"lease_seconds", "renew_deadline_seconds", "retry_seconds"},
    }
    for name, bounds in found.items():
        assert bounds == {key: value for key, value in known[_snake(name)].items() if key not in ("title", "default")}


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def test_every_value_is_known_to_the_schema_and_has_a_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global", "enabled"} == set(values)
    for name, section in schema["properties"].items():
        if name not in ("settings", "global", "resources") and "properties" in section:
            assert set(section["properties"]) == set(values[name]), name


# --- what stands twice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"webhook": {"certificates": "CertManager"}},
        {"namespaces": ["team-a"], "webhook": {"certificates": "CertManager"}},
    ],
    ids=str,
)
def test_the_api_server_is_led_to_what_the_operator_serves(told: Told, values: Values) -> None:
    settings, rendered = told(values)
    ports = {port["name"]: port["containerPort"] for port in rendered.container["ports"]}
    assert ports == {"http": settings.http_port, "webhook": settings.webhook_port}
    hooks = rendered.find_one("ValidatingWebhookConfiguration")
    assert hooks["metadata"]["name"] == settings.webhook_configuration
    [hook] = hooks["webhooks"]
    service = hook["clientConfig"]["service"]
    assert (hook["name"], service["path"]) == (review.HOOK, review.PATH)
    assert (service["name"], service["namespace"]) == (settings.webhook_service, NAMESPACE)
    [port] = rendered.find_one("Service", settings.webhook_service)["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (service["port"], "webhook")


def test_rights_by_name_are_to_what_the_operator_uses(told: Told) -> None:
    settings, rendered = told({})
    named = {
        rule["resources"][0]: rule["resourceNames"]
        for kind in ("Role", "ClusterRole")
        for role in rendered.find_all(kind)
        if "helm.sh/hook" not in role["metadata"].get("annotations", {})
        for rule in role["rules"]
        if "resourceNames" in rule
    }
    assert named == {
        "leases": [settings.lease_name],
        "secrets": [settings.webhook_secret],
        "validatingwebhookconfigurations": [settings.webhook_configuration],
    }
    assert rendered.find_one("Secret")["metadata"]["name"] == settings.webhook_secret
    assert rendered.find_one("Lease")["metadata"]["name"] == settings.lease_name


def test_a_certificate_of_cert_manager_is_for_the_names_the_operator_goes_by(told: Told) -> None:
    settings, rendered = told({"webhook": {"certificates": "CertManager"}})
    spec = rendered.find_one("Certificate")["spec"]
    assert spec["dnsNames"] == list(service_hosts(settings.webhook_service, NAMESPACE))
    assert spec["secretName"] == settings.webhook_secret


def test_probes_and_metrics_ask_the_port_that_answers(told: Told) -> None:
    settings, rendered = told({})
    container = rendered.container
    asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {get["port"] for get in asked.values()} == {"http"}
    assert [get["path"] for get in asked.values()] == ["/healthz", "/healthz", "/readyz"]
    [port] = rendered.find_one("Service", "moejob-operator")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (settings.http_port, "http")


def test_the_operator_may_reach_the_pods_of_jobs(helm: Helm) -> None:
    policy = helm.render({"networkPolicy": {"egress": True}}).find_one("NetworkPolicy", "moejob-operator")
    [rule] = [rule for rule in policy["spec"]["egress"] if "to" in rule]
    assert rule["ports"] == [{"port": PodPort.PROGRESS, "protocol": "TCP"}]
    assert rule["to"][0]["podSelector"]["matchLabels"] == {Label.MANAGED_BY: MANAGED_BY}


@pytest.mark.parametrize("stop_seconds", [None, 45.5])
def test_a_pod_gets_as_long_to_end_as_the_operator_takes(told: Told, stop_seconds: float | None) -> None:
    settings, rendered = told({} if stop_seconds is None else {"settings": {"stopSeconds": stop_seconds}})
    sleep = rendered.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    takes = sleep + settings.stop_seconds + lifecycle.CLOSING_SECONDS
    assert takes < rendered.pod["spec"]["terminationGracePeriodSeconds"]
