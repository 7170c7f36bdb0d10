"""What the operator creates is what was reviewed; and every pod of it keeps to the restricted Pod Security profile."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from golden_manifests import FOLDER, GOLDEN, Golden, text

EVERY = pytest.mark.parametrize("golden", [pytest.param(found, id=found.name) for found in GOLDEN])


@EVERY
def test_a_job_gets_the_objects_that_were_reviewed(golden: Golden) -> None:
    assert text(golden) == (FOLDER / f"{golden.name}.yaml").read_text(), "if that is meant, make generate and review"


def test_no_reviewed_file_is_of_a_job_that_is_no_more() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == {golden.name for golden in GOLDEN}


@EVERY
def test_pods_keep_to_the_restricted_profile(golden: Golden) -> None:
    for pod in pods(golden):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}} <= {
            "emptyDir",
            "persistentVolumeClaim",
        }
        [container] = spec["containers"]
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert security["capabilities"]["drop"] == ["ALL"]
        # The one exception, and only where memory has to be pinned for a network card.
        has_card = any(name.startswith("rdma/") for name in container["resources"].get("limits", {}))
        assert security["capabilities"].get("add", []) == (["IPC_LOCK"] if has_card else [])


def pods(golden: Golden) -> list[dict[str, Any]]:
    """Every pod of a job."""
    found = [made for made in yaml.safe_load_all(text(golden)) if made["kind"] == "Pod"]
    assert found
    return found
