"""The dashboard shows what the operator exports, all of it, by the names it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from charts import CHART, Helm
from moejob_operator.runtime.metrics import Metrics
from moejob_operator.runtime.work_queue import WorkOutcome

DASHBOARD = CHART / "files" / "dashboard.json"
# What Prometheus adds to all that it reads.
ADDED = {"job", "namespace", "pod", "le"}
_NAME = re.compile(r"\b(?:moejob|process)_\w+")
_LABELS = re.compile(r"(?:by \(([^)]*)\))|\{([^}]*)\}")


def exported() -> dict[str, set[str]]:
    """Every sample of an operator that has done each thing once, with its labels."""
    metrics = Metrics()
    metrics.count_jobs(
        lambda: [
            {
                "metadata": {"namespace": "team"},
                "status": {"phase": "Running", "layout": {"gpus": 8}, "why": {"blocker": "NodeLost"}},
            }
        ]
    )
    metrics.set_queue_depth(1)
    metrics.observe_wait(0.1)
    metrics.observe_work(0.1, WorkOutcome.RETRIED)
    metrics.count_request("get", "pods", "200", 0.1)
    metrics.set_leading(True)
    metrics.count_review("denied", 0.1)
    metrics.set_certificate_end(1.0)
    metrics.count_status_change({}, {"phase": "Failed", "restarts": {"total": 1}, "goodput": {"lostGpuHours": 1}})
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.format_text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[str]:
    dashboard: Mapping[str, Any] = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def labels(expression: str) -> set[str]:
    """Labels that are grouped by or selected."""
    inner = [part for groups in _LABELS.findall(expression) for part in groups if part]
    return {re.split(r"[=!~]", word, maxsplit=1)[0].strip() for part in inner for word in part.split(",")}


def test_every_name_and_label_on_the_dashboard_is_one_that_the_operator_exports() -> None:
    known = exported()
    asked = list(expressions())
    assert len(asked) > 15
    for expression in asked:
        names = _NAME.findall(expression)
        assert names
        assert set(names) <= set(known), expression
        assert labels(expression) <= ADDED.union(*(known[name] for name in names)), expression


def test_everything_that_the_operator_exports_of_itself_is_on_the_dashboard() -> None:
    families = {
        re.sub(r"_(bucket|sum|count|created|total)$", "", name) for name in exported() if name.startswith("moejob_")
    }
    shown = {re.sub(r"_(bucket|count|total)$", "", name) for text in expressions() for name in _NAME.findall(text)}
    assert families - shown == set()


def test_legends_name_labels_that_are_there() -> None:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels(target["expr"]) | ADDED


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_grafana_is_given_the_dashboard_as_it_is(helm: Helm) -> None:
    rendered = helm.render({"metrics": {"dashboard": {"enabled": True, "labels": {"grafana_dashboard": "1"}}}})
    found = rendered.find_one("ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    for name, file in (("moejob", "dashboard"), ("moejob-runs", "dashboard-runs")):
        assert json.loads(found["data"][f"{name}.json"]) == json.loads((CHART / "files" / f"{file}.json").read_text())
