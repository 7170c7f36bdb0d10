"""Owns the CRD on the control plane."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.control_plane.api import RefusedError
from cluster.control_plane.plane import ControlPlane, KubectlError
from cluster.waiting import until

DEFINITION = Path(__file__).parents[3] / "crds" / "moetrainingjobs.yaml"


@pytest.fixture(scope="session")
def definition(control_plane: ControlPlane) -> Path:
    """The CRD, applied as people apply it: by the client, which keeps a copy of it in an annotation."""

    def is_known() -> bool:
        try:
            # There is a moment before jobs can be kept, and clients can look up names and schemas.
            control_plane.api.get("/apis/moejob.dev/v1alpha1/moetrainingjobs")
            return bool(control_plane.kubectl("explain", "mtj"))
        except (KubectlError, RefusedError):
            return False

    control_plane.kubectl("apply", "--server-side=false", "-f", DEFINITION)
    # Not `kubectl wait`: it fails on a definition that has no conditions yet. And clients know names and schemas last.
    until(is_known, waiting_for="kubectl to know the short name and the schema")
    return DEFINITION
