"""The dashboard of runs and the alerts about them ask what pods export, in expressions that Prometheus can parse."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from moejob_api.contract.pods import PodProgress, ReportedHeartbeat, RunProgress
from moejob_api.router_health import health_measures
from moejob_trainer.launcher.metrics import format_metrics

ROOT = Path(__file__).parents[3]
FILES = ROOT / "charts" / "moejob" / "files"
PAGES = (ROOT / "docs" / "trainer" / "metrics.md", ROOT / "docs" / "grpo.md")
# Labels of Prometheus, and the one that the chart's PodMonitor gives.
ADDED = {"namespace", "pod", "moejob"}
# Numbers of a line that RunProgress has in fields of its own.
FIELDS: dict[str, float] = {
    "epoch": 1.0,
    "loss": 1.0,
    "mtp_loss": 1.0,
    "reward": 1.0,
    "learning_rate": 1.0,
    "gradient_norm": 1.0,
    "tokens_per_second_per_gpu": 1.0,
    "mfu": 1.0,
    "save_seconds": 1.0,
}
_PARSE = "import json, sys, promql_parser\nfor text in json.load(sys.stdin): promql_parser.parse(text)"


def documented_names() -> set[str]:
    """Names of numbers in the tables of the pages that an own string of the trainer's code also has."""
    folders = (ROOT / "trainer" / "src", ROOT / "crds" / "src" / "moejob_api" / "contract")
    sources = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    rows = [line for page in PAGES for line in page.read_text().splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+(?:/NAME)?)`", row.split(" | ")[0])}
    written = set(re.findall(r'"(\w+)"', sources)) | set(re.findall(r'f"(\w+)/', sources))
    return {name for name in names if name.removesuffix("/NAME") in written}


@cache
def exported() -> dict[str, set[str]]:
    """Every metric of pod 0 of a run that has each number, with its labels."""
    measures = dict.fromkeys((name.replace("NAME", "a") for name in documented_names()), 1.0)
    fields = {"step": 1, "total_steps": 2, "last_checkpoint_step": 1, **FIELDS}
    run = RunProgress.model_validate({**fields, "measures": {**measures, **health_measures((1,))}})
    beat = ReportedHeartbeat(rank=0, pid=1, step=1, age_seconds=1.0)
    pod = PodProgress(attempt=0, index=0, ready=True, ranks=(beat,), run=run, phase="stepping", phase_seconds=1.0)
    metrics: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(moejob_\w+)(?:\{(.*)\})? ", format_metrics(pod), re.MULTILINE):
        metrics.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return metrics


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups if group["name"] == "moejob-runs" for rule in group["rules"]]


def targets(file: str = "dashboard-runs.json") -> Iterator[dict[str, Any]]:
    for panel in json.loads((FILES / file).read_text())["panels"]:
        yield from panel.get("targets", ())


def assert_is_exported(expression: str) -> None:
    names = re.findall(r"\bmoejob_\w+", expression)
    assert names
    assert set(names) <= set(exported()), expression
    groups = [part for pair in re.findall(r"by \(([^)]*)\)|\{([^}]*)\}", expression) for part in pair if part]
    asked = {re.split(r"[=!~]", word, maxsplit=1)[0].strip() for part in groups for word in part.split(",")}
    assert asked <= ADDED.union(*(exported()[name] for name in names)), expression


def test_the_names_of_the_pages_are_found() -> None:
    assert {"expertUse", "mismatchMean", "reward/NAME", "engineWaitShare", "peakMemoryBytes"} <= documented_names()


def test_the_dashboard_asks_what_pods_export() -> None:
    dashboard = json.loads((FILES / "dashboard-runs.json").read_text())
    expressions = [target["expr"] for target in targets()]
    assert len(expressions) > 40
    for expression in expressions:
        assert_is_exported(expression)
    for variable in dashboard["templating"]["list"][1:]:
        (name, label) = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
        assert name in exported()
        assert label in ADDED


def test_legends_of_the_dashboard_name_labels_that_are_there() -> None:
    for target in targets():
        (name,) = re.findall(r"\bmoejob_\w+", target["expr"])
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= ADDED | exported()[name]


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((FILES / "dashboard-runs.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_what_pods_export(rule: dict[str, Any]) -> None:
    assert_is_exported(rule["expr"])
    assert set(re.findall(r"\$labels\.(\w+)", f"{rule['annotations']}")) <= ADDED


def test_prometheus_can_parse_every_expression() -> None:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    files = ("dashboard.json", "dashboard-runs.json")
    expressions = [target["expr"].replace("$__rate_interval", "5m") for file in files for target in targets(file)]
    expressions += [rule["expr"] for group in groups for rule in group["rules"]]
    parse_expressions(expressions)
    with pytest.raises(subprocess.CalledProcessError):
        parse_expressions([*expressions, "sum by (moejob (moejob_step)"])


def parse_expressions(expressions: list[str]) -> None:
    python = ROOT / ".venv/mlflow/bin/python"
    subprocess.run([python, "-c", _PARSE], input=json.dumps(expressions), text=True, check=True, capture_output=True)
