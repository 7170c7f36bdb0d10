"""The fields of a profile are those of a job that say where it runs, and the definitions of both kinds hold them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from api_server import ROOT
from moejob_api.crd.definition import profile_definition
from moejob_api.crd.immutability import MUTABLE
from moejob_api.job.fields import FieldKind, job_fields
from moejob_api.profiles.fields import PROFILED_FIELDS, ProfileKind, profile_fields

# They say what a run is, or are never chosen for a person who does not ask for them.
OF_THE_JOB_ALONE = {"resources": {"accelerator", "spares"}}


def test_every_field_of_resources_is_in_a_profile_or_left_out_on_purpose() -> None:
    fields = set(job_fields().fields["spec"].fields["resources"].fields)
    assert set(PROFILED_FIELDS["resources"]) == fields - OF_THE_JOB_ALONE["resources"]
    assert set(PROFILED_FIELDS["podTemplate"]) == set(job_fields().fields["spec"].fields["podTemplate"].fields)


def test_no_field_of_a_profile_can_change_while_a_job_lives() -> None:
    assert {f"{section}.{name}" for section, names in PROFILED_FIELDS.items() for name in names} & MUTABLE == set()


def test_a_profile_requires_nothing_and_no_scalar_has_a_default() -> None:
    for section in profile_fields().fields.values():
        assert section.required == frozenset()
        for name, field in section.fields.items():
            assert field.default in (None, [], {}), name
            assert (field.kind in (FieldKind.LIST, FieldKind.MAP)) or field.default is None, name


@pytest.mark.parametrize("kind", ProfileKind)
def test_a_definition_is_small_enough_for_client_side_apply(kind: ProfileKind) -> None:
    assert len(json.dumps(profile_definition(kind), separators=(",", ":"))) < 20_000


def test_the_file_holds_a_definition_for_each_kind_and_no_status() -> None:
    documents = list(yaml.safe_load_all((ROOT / "crds" / "moetrainingprofiles.yaml").read_text()))
    assert documents == [profile_definition(kind) for kind in ProfileKind]
    scopes = {found["spec"]["names"]["kind"]: found["spec"]["scope"] for found in documents}
    assert scopes == {"MoETrainingProfile": "Namespaced", "ClusterMoETrainingProfile": "Cluster"}
    versions: list[dict[str, Any]] = [version for found in documents for version in found["spec"]["versions"]]
    assert all("subresources" not in version for version in versions)
    assert all("status" not in version["schema"]["openAPIV3Schema"]["properties"] for version in versions)
