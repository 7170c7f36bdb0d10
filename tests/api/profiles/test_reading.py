"""Profiles from files, and jobs merged with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import SFT
from moejob_api.problems import InvalidSpec
from moejob_api.profiles.fields import ProfileKind
from moejob_api.profiles.reading import merge_job_file, read_profile_body, read_profile_file


def profile_text(**changes: Any) -> str:
    body = {
        "apiVersion": "moejob.dev/v1beta1",
        "kind": "ClusterMoETrainingProfile",
        "metadata": {"name": "h100"},
        "spec": {"resources": {"gpuType": "H100"}},
    }
    return yaml.safe_dump(body | changes)


def job_text(**spec: Any) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "moejob.dev/v1beta1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "job"},
            "spec": SFT | spec,
        }
    )


def test_a_file_is_read_by_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(profile_text())
    profile = read_profile_file(file)
    assert (profile.kind, profile.name, profile.spec) == (
        ProfileKind.CLUSTER,
        "h100",
        {"resources": {"gpuType": "H100"}},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"kind": "MoETrainingJob"}, "is no profile; write apiVersion: moejob.dev/v1beta1", id="a job"),
        pytest.param({"apiVersion": "v1"}, "is no profile", id="another API"),
        pytest.param({"metadata": {}}, "metadata.name is missing", id="no name"),
        pytest.param({"spec": {"model": {}}}, "spec.model is no section of a profile", id="a section of jobs"),
        pytest.param(
            {"spec": {"resources": {"accelerator": "CPU"}}},
            "spec.resources.accelerator is no field of a profile; write it into the job",
            id="a field of jobs",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(profile_text(**changes))
    with pytest.raises(InvalidSpec) as refusal:
        read_profile_file(file)
    assert message in str(refusal.value)


def test_a_job_file_is_merged_after_settings_were_made_in_it(tmp_path: Path) -> None:
    job, profile = tmp_path / "job.yaml", tmp_path / "profile.yaml"
    job.write_text(job_text(profile="h100"))
    profile.write_text(profile_text(spec={"resources": {"gpuType": "H100", "image": "shared:1"}}))
    merged = merge_job_file(job, read_profile_file(profile), ("resources.image=mine:1",))
    assert merged.profile.values == {"resources": {"gpuType": "H100"}}
    assert (merged.job.spec.resources.gpu_type, merged.job.spec.resources.image) == ("H100", "mine:1")
    assert merged.job.spec.profile is None


def test_a_job_that_names_another_profile_is_not_merged(tmp_path: Path) -> None:
    job, profile = tmp_path / "job.yaml", tmp_path / "profile.yaml"
    job.write_text(job_text(profile="b200"))
    profile.write_text(profile_text())
    with pytest.raises(InvalidSpec, match="the job names the profile b200, and the file holds h100"):
        merge_job_file(job, read_profile_file(profile))


def test_a_value_of_a_wrong_type_is_refused_in_the_words_of_jobs(tmp_path: Path) -> None:
    job, profile = tmp_path / "job.yaml", tmp_path / "profile.yaml"
    job.write_text(job_text())
    profile.write_text(profile_text(spec={"resources": {"gpusPerNode": "eight"}}))
    with pytest.raises(InvalidSpec, match=r"spec\.resources\.gpusPerNode: must be"):
        merge_job_file(job, read_profile_file(profile))


@pytest.mark.parametrize("body", [{}, {"metadata": 3, "spec": []}, {"metadata": {"generation": -1, "name": 4}}])
def test_a_body_that_is_nothing_like_a_profile_raises_nothing(body: dict[str, Any]) -> None:
    profile = read_profile_body(body, ProfileKind.NAMESPACED)
    assert (profile.name, profile.spec, profile.generation) == ("", {}, 0)
