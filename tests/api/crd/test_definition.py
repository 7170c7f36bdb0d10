"""The contents of the generated CRD, and that the files on disk are it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from api_server import CRD, ROOT
from builders import GRPO, SFT
from moejob_api.crd.__main__ import FILES, crd_text, main
from moejob_api.crd.definition import crd_definition
from moejob_api.job import Spec
from moejob_api.job.fields import FieldKind, job_fields

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def schema() -> Schema:
    """The schema of the stored version; the other has the same."""
    spec: Any = crd_definition()["spec"]
    found: Schema = spec["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def test_the_files_on_disk_are_what_the_models_say() -> None:
    assert main(["--check", "--root", str(ROOT)]) == 0


def test_a_stale_file_is_shown_as_a_short_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0
    stale = tmp_path / FILES[0]
    stale.write_text(stale.read_text().replace("kind: MoETrainingJob\n", "kind: Job\n"))
    capsys.readouterr()
    assert main(["--check", "--root", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "-    kind: Job" in said
    assert "run: make generate" in said
    assert str(FILES[1]) not in said


def test_generating_twice_gives_the_same_text() -> None:
    assert crd_text() == crd_text()


def test_every_reader_of_yaml_reads_the_same_file() -> None:
    assert yaml.safe_load(CRD.read_text()) == crd_definition()


def test_the_file_is_small_enough_for_client_side_apply() -> None:
    # What kubectl writes into an annotation, which takes 262,144 bytes: JSON, not the blanks that YAML is indented by.
    assert len(json.dumps(crd_definition(), separators=(",", ":"))) < 200_000


def test_both_versions_have_the_same_fields_and_the_first_releases_is_stored() -> None:
    spec: Any = crd_definition()["spec"]
    stored, newest = spec["versions"]
    assert (stored["name"], newest["name"], spec["conversion"]) == ("v1alpha1", "v1beta1", {"strategy": "None"})
    assert [version["storage"] for version in (stored, newest)] == [True, False]
    assert stored | {"name": "v1beta1", "storage": False} == newest


def test_no_pod_template_is_inside(schema: Schema) -> None:
    assert "containers" not in {path.rpartition(".")[2] for path, _ in _properties(schema)}


def test_every_field_is_described(schema: Schema) -> None:
    own = {"apiVersion", "kind", "metadata"}
    assert [path for path, inner in _properties(schema) if path not in own and not inner.get("description")] == []


def test_every_list_says_how_it_is_merged(schema: Schema) -> None:
    lists = {path: inner for path, inner in _properties(schema) if inner.get("type") == "array"}
    keyed = {path: inner["x-kubernetes-list-map-keys"] for path, inner in lists.items() if _is_keyed(inner)}
    assert keyed == {"spec.resources.env": ["name"], "status.conditions": ["type"], "status.replicaStatuses": ["role"]}
    assert all(_is_keyed(inner) or inner["x-kubernetes-list-type"] == "atomic" for inner in lists.values())


def test_everything_a_user_writes_is_bounded() -> None:
    unbounded = [
        path
        for path, field in job_fields().fields["spec"].walk_fields("spec")
        if (field.kind in (FieldKind.WHOLE, FieldKind.NUMBER) and None in (field.minimum, field.maximum))
        or (field.kind in (FieldKind.LIST, FieldKind.MAP) and field.longest is None)
        or (field.kind in (FieldKind.TEXT, FieldKind.WHOLE_OR_TEXT) and field.longest is None and not field.choices)
    ]
    assert unbounded == []


@pytest.mark.parametrize("given", [SFT, GRPO], ids=["sft", "grpo"])
def test_filling_in_defaults_gives_what_the_models_give(schema: Schema, given: dict[str, Any]) -> None:
    filled = copy.deepcopy(given)
    _fill(filled, schema["properties"]["spec"])
    model = Spec.model_validate_json(json.dumps(given))
    assert filled == model.model_dump(mode="json", by_alias=True, exclude_none=True)


def test_the_columns_are_those_of_the_design() -> None:
    spec: Any = crd_definition()["spec"]
    columns = spec["versions"][0]["additionalPrinterColumns"]
    names = [column["name"].upper() for column in columns]
    wide = ["EVAL LOSS", "SPEED", "ETA", "WHY", "RESTARTS"]
    assert names == ["METHOD", "PHASE", "GPUS", "NODES", "STEP", "SCORE", "EVAL", *wide, "AGE"]
    assert [column["name"].upper() for column in columns if column.get("priority")] == wide


def test_every_column_shows_a_field_that_exists(schema: Schema) -> None:
    spec: Any = crd_definition()["spec"]
    paths = {f".{path}" for path, _ in _properties(schema)} | {".metadata.creationTimestamp"}
    assert {column["jsonPath"] for column in spec["versions"][0]["additionalPrinterColumns"]} <= paths


def _properties(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    for name, inner in schema.get("properties", {}).items():
        inside = f"{path}.{name}" if path else name
        yield inside, inner
        yield from _properties(inner, inside)
    for key, mark in (("items", "[]"), ("additionalProperties", "[]")):
        if key in schema:
            yield from _properties(schema[key], f"{path}{mark}")


def _is_keyed(schema: Schema) -> bool:
    return schema.get("x-kubernetes-list-type") == "map"


def _fill(value: Any, schema: Schema) -> None:
    """Structural defaulting, as apiextensions-apiserver does it."""
    if isinstance(value, list):
        for item in value:
            _fill(item, schema["items"])
    if not isinstance(value, dict):
        return
    for name, inner in schema.get("properties", {}).items():
        if name not in value and "default" in inner:
            value[name] = copy.deepcopy(inner["default"])
        if name in value:
            _fill(value[name], inner)
