"""The rights that the chart gives are those that were reviewed, right by right.

`MOEJOB_GOLDEN=write` writes the files again instead of comparing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from charts import Helm, Object, Values

FOLDER = Path(__file__).parent / "golden"
WRITES = os.environ.get("MOEJOB_GOLDEN") == "write"
KINDS = {"ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
CASES: dict[str, Values] = {
    "all-namespaces": {},
    "all-namespaces-cert-manager": {"webhook": {"certificates": "CertManager"}},
    "two-namespaces": {"namespaces": ["team-a", "team-b"], "webhook": {"certificates": "CertManager"}},
    "one-namespace-and-nothing-beyond": {
        "namespaces": ["team-a"],
        "crd": {"install": False},
        "rbac": {"nodes": False},
        "webhook": {"enabled": False},
        "admissionPolicy": {"enabled": False},
    },
}


def rights(helm: Helm, values: Values) -> str:
    """Every right and who has it, in the order of the chart; labels of releases and versions are left out."""
    found = [_reviewed(one) for one in helm.render(values).objects if one["kind"] in KINDS]
    return yaml.safe_dump_all(found, sort_keys=False, width=120)


def _reviewed(one: Object) -> Object:
    metadata = {key: value for key, value in one["metadata"].items() if key != "labels"}
    return {"kind": one["kind"], "metadata": metadata} | {
        key: value for key, value in one.items() if key not in ("apiVersion", "kind", "metadata")
    }


@pytest.mark.parametrize("name", [*CASES])
def test_the_chart_gives_the_rights_that_were_reviewed(helm: Helm, name: str) -> None:
    file, found = FOLDER / f"{name}.yaml", rights(helm, CASES[name])
    if WRITES:
        file.write_text(found)
    assert found == file.read_text(), "if that is meant, run this test with MOEJOB_GOLDEN=write and review"


def test_no_reviewed_file_is_of_an_installation_that_is_no_more() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == {*CASES}
