"""The merge of a job with its profile: what wins, what is joined, and what has no meaning in the job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builders import GRPO, SFT, merge_sections
from moejob_api.job import Spec
from moejob_api.profiles.merging import profile_values, with_values


def resources(**fields: Any) -> dict[str, Any]:
    return {"resources": fields}


SEPARATE = {"method": "GRPO", "grpo": GRPO["grpo"] | {"rollout": {"placement": "Separate"}}}
TOLERATED_A, TOLERATED_B = ({"key": key, "operator": "Exists"} for key in "ab")
OTHER_GPUS = {"gpuMemoryGiB": 64}


@pytest.mark.parametrize(
    ("job", "profile", "values"),
    [
        pytest.param({}, {}, {}, id="an empty profile gives nothing"),
        pytest.param({}, resources(image="a:1"), resources(image="a:1"), id="a value that the job lacks"),
        pytest.param(resources(image="b:1"), resources(image="a:1"), {}, id="a value of the job's own wins"),
        pytest.param(resources(image="a:1"), resources(image="a:1"), {}, id="an equal value is not the profile's"),
        pytest.param({}, resources(gpusPerNode=4), resources(gpusPerNode=4), id="a default counts as not given"),
        pytest.param(
            resources(gpusPerNode=8),
            resources(gpusPerNode=4),
            resources(gpusPerNode=4),
            id="also when it is written: the API server writes it too",
        ),
        pytest.param(resources(gpusPerNode=2), resources(gpusPerNode=4), {}, id="another value than the default wins"),
        pytest.param(
            resources(nodeSelector={"pool": "b", "zone": "1"}),
            resources(nodeSelector={"pool": "a", "rack": "2"}),
            resources(nodeSelector={"pool": "b", "rack": "2", "zone": "1"}),
            id="selectors are joined by their keys",
        ),
        pytest.param(
            resources(tolerations=[TOLERATED_B]),
            resources(tolerations=[TOLERATED_A, TOLERATED_B]),
            resources(tolerations=[TOLERATED_A, TOLERATED_B]),
            id="tolerations are added once",
        ),
        pytest.param(
            resources(env=[{"name": "A", "value": "job"}]),
            resources(env=[{"name": "A", "secret": {"name": "s", "key": "k"}}, {"name": "B", "value": "profile"}]),
            resources(env=[{"name": "A", "value": "job"}, {"name": "B", "value": "profile"}]),
            id="variables are joined by their names, whole",
        ),
        pytest.param(
            resources(imagePullSecrets=["b"]),
            resources(imagePullSecrets=["a", "b"]),
            resources(imagePullSecrets=["a", "b"]),
            id="secrets of registries are added",
        ),
        pytest.param(
            resources(rdma={"resource": "rdma/b", "count": 1}),
            resources(rdma={"resource": "rdma/a", "count": 8, "networks": "net"}),
            {},
            id="cards are one value",
        ),
        pytest.param(resources(**OTHER_GPUS), resources(gpuType="H100"), {}, id="a job with another GPU has no type"),
        pytest.param(
            {"storage": {"size": "1Ti"}},
            {"storage": {"storageClass": "fast"}},
            {"storage": {"storageClass": "fast"}},
            id="a new claim has the storage class",
        ),
        pytest.param(
            {"storage": {"size": None, "claimName": "models"}},
            {"storage": {"storageClass": "fast", "accessModes": ["ReadWriteOnce"]}},
            {},
            id="a claim that exists has its own",
        ),
        pytest.param({}, resources(rolloutImage="r:1"), {}, id="no engine image without engine pods"),
        pytest.param(SEPARATE, resources(rolloutImage="r:1"), resources(rolloutImage="r:1"), id="an image of engines"),
        pytest.param(
            {},
            {"podTemplate": {"trainer": {"spec": {}}, "rollout": {"spec": {}}}},
            {"podTemplate": {"trainer": {"spec": {}}}},
            id="no template of engines without engine pods",
        ),
        pytest.param(
            {"lifecycle": {"queue": "mine"}},
            {"lifecycle": {"queue": "shared", "gang": "Kueue"}},
            {"lifecycle": {"gang": "Kueue"}},
            id="a queue of the job's own",
        ),
    ],
)
def test_a_profile_gives(job: dict[str, Any], profile: dict[str, Any], values: dict[str, Any]) -> None:
    spec = merge_sections(GRPO if job.get("method") == "GRPO" else SFT, job)
    assert profile_values(spec, profile) == values


def test_a_job_from_a_file_and_the_same_with_all_defaults_merge_alike() -> None:
    """The API server writes defaults into a job, and plan reads it before."""
    profile = {
        "resources": {"gpusPerNode": 4, "qosClass": "Guaranteed", "tolerations": [{"key": "a", "operator": "Exists"}]},
        "lifecycle": {"gang": "Kueue", "queue": "q"},
        "storage": {"accessModes": ["ReadWriteOnce"]},
    }
    written = merge_sections(SFT, {"resources": {"image": "own:1"}})
    stored = json.loads(Spec.model_validate_json(json.dumps(written)).model_dump_json(by_alias=True, exclude_none=True))
    merged, merged_later = (with_values(spec, profile_values(spec, profile)) for spec in (written, stored))
    assert Spec.model_validate_json(json.dumps(merged)) == Spec.model_validate_json(json.dumps(merged_later))


def test_a_merged_job_names_no_profile_and_keeps_all_else() -> None:
    spec = SFT | {"profile": "shared"}
    merged = with_values(spec, {"resources": {"image": "a:1"}})
    assert merged == SFT | {"resources": {"image": "a:1"}}
    assert spec["profile"] == "shared"
    assert "resources" not in spec
