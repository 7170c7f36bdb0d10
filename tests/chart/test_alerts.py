"""Alerts are rendered as they are written, and ask of the operator what it exports.

The alerts about runs, and all expressions, are tested beside the trainer, which exports their metrics:
tests/trainer/launcher/test_dashboards.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from chart.test_dashboard import ADDED, exported, labels
from charts import CHART, Helm
from moejob_api.diagnosis.blockers import Blocker

ALERTS = CHART / "files" / "alerts.yaml"
GROUPS: dict[str, list[dict[str, Any]]] = {
    group["name"]: group["rules"] for group in yaml.safe_load(ALERTS.read_text())["groups"]
}


@pytest.mark.parametrize("rule", GROUPS["moejob-operator"], ids=lambda rule: rule["alert"])
def test_an_alert_asks_what_the_operator_exports(rule: dict[str, Any]) -> None:
    known, names = exported(), re.findall(r"\bmoejob_\w+", rule["expr"])
    assert names
    assert set(names) <= set(known)
    assert labels(rule["expr"]) <= ADDED.union(*(known[name] for name in names))
    words = f"{rule['annotations']}"
    assert set(re.findall(r"\$labels\.(\w+)", words)) <= ADDED.union(*(known[name] for name in names))


def test_obstacles_that_no_alert_tells_are_ones_that_there_are() -> None:
    (rule,) = (rule for rule in GROUPS["moejob-operator"] if rule["alert"] == "MoejobJobBlocked")
    (pattern,) = re.findall(r'blocker!~"([^"]+)"', rule["expr"])
    assert set(pattern.split("|")) <= set(Blocker)


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    rules = [rule for group in GROUPS.values() for rule in group]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_page_of_the_chart_lists_every_alert() -> None:
    listed = re.findall(r"^\| `(Moejob\w+)` \|", (CHART / "README.md").read_text(), re.MULTILINE)
    assert listed == [rule["alert"] for group in GROUPS.values() for rule in group]


def test_the_chart_has_no_alert_nor_monitor_unless_asked(helm: Helm) -> None:
    kinds = {found["kind"] for found in helm.render().objects}
    assert not kinds & {"PrometheusRule", "PodMonitor", "ServiceMonitor"}


def test_prometheus_is_given_the_alerts_as_they_are(helm: Helm) -> None:
    rendered = helm.render({"metrics": {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}})
    found = rendered.find_one("PrometheusRule")
    assert found["metadata"]["labels"]["release"] == "prometheus"
    assert found["spec"] == yaml.safe_load(ALERTS.read_text())


@pytest.mark.parametrize(
    ("values", "selector"),
    [
        pytest.param({}, {"any": True}, id="all namespaces"),
        pytest.param({"namespaces": ["a", "b"], "webhook": {"enabled": False}}, {"matchNames": ["a", "b"]}, id="two"),
    ],
)
def test_trainer_pods_of_the_served_namespaces_are_read(
    helm: Helm, values: dict[str, Any], selector: dict[str, Any]
) -> None:
    found = helm.render({**values, "metrics": {"podMonitor": {"enabled": True}}}).find_one("PodMonitor")
    assert found["spec"]["namespaceSelector"] == selector
    (endpoint,) = found["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("progress", "/metrics")
    assert [one["targetLabel"] for one in endpoint["relabelings"]] == ["moejob"]
