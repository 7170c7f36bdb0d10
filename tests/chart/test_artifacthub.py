"""The annotations that ArtifactHub shows, against the definitions that the chart installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import CHART
from moejob_api.models.sources import UnseenModel
from moejob_api.profiles.fields import ProfileKind
from moejob_api.profiles.reading import merge_job_file, read_profile_file
from moejob_cli.inputs import job_model_shape, plan_read_job


def annotation(name: str) -> Any:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return yaml.safe_load(about["annotations"][f"artifacthub.io/{name}"])


def test_every_definition_of_the_chart_is_named_with_its_newest_version() -> None:
    files = sorted((CHART / "files").glob("moetraining*.yaml"))
    definitions = [found for file in files for found in yaml.load_all(file.read_text(), yaml.CSafeLoader)]
    assert {(entry["name"], entry["kind"], entry["version"]) for entry in annotation("crds")} == {
        (found["metadata"]["name"], found["spec"]["names"]["kind"], found["spec"]["versions"][-1]["name"])
        for found in definitions
    }
    assert all(entry["displayName"] and entry["description"] for entry in annotation("crds"))


def test_the_examples_are_a_job_and_its_profile_that_plan_accepts(tmp_path: Path) -> None:
    job, profile = annotation("crdsExamples")
    for name, body in (("job", job), ("profile", profile)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(body))
    merged = merge_job_file(tmp_path / "job.yaml", read_profile_file(tmp_path / "profile.yaml"))
    assert merged.profile.kind == ProfileKind.CLUSTER
    assert not isinstance(job_model_shape(merged.job), UnseenModel)
    answer = plan_read_job(merged.job)
    assert answer.plan.problems == ()


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        # ArtifactHub takes no other words for these.
        pytest.param(
            "category",
            {
                *("ai-machine-learning", "database", "integration-delivery", "monitoring-logging", "networking"),
                *("security", "storage", "streaming-messaging", "skip-prediction"),
            },
            id="category",
        ),
        pytest.param(
            "operatorCapabilities",
            {"Basic Install", "Seamless Upgrades", "Full Lifecycle", "Deep Insights", "Auto Pilot"},
            id="capabilities",
        ),
    ],
)
def test_a_closed_choice_of_artifacthub_is_one_of_its_words(name: str, choices: set[str]) -> None:
    assert annotation(name) in choices
