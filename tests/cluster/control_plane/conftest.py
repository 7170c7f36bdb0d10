"""Owns the CRD on the control plane, with the policy of its rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api_server import job_body
from builders import SFT, merge_sections
from cluster.control_plane.api import RefusedError
from cluster.control_plane.plane import ControlPlane, KubectlError
from cluster.waiting import until
from moejob_api.profiles.fields import API_VERSION, ProfileKind

CRDS = Path(__file__).parents[3] / "crds"
DEFINITION, RULES = CRDS / "moetrainingjobs.yaml", CRDS / "rules.yaml"
PROFILES = CRDS / "moetrainingprofiles.yaml"
BROKEN = json.dumps(job_body(merge_sections(SFT, {"training": {"maxSteps": 1, "epochs": 1}})))


@pytest.fixture(scope="session")
def definition(control_plane: ControlPlane) -> Path:
    """The CRD, applied as people apply it: by the client, which keeps a copy of it in an annotation."""

    def is_known() -> bool:
        try:
            # There is a moment before jobs can be kept, and clients can look up names and schemas.
            control_plane.api.get("/apis/moejob.dev/v1alpha1/moetrainingjobs")
            for kind in ProfileKind:
                control_plane.api.get(f"/apis/{API_VERSION}/{kind.plural}")
            return bool(control_plane.kubectl("explain", "mtj"))
        except (KubectlError, RefusedError):
            return False

    def is_in_force() -> bool:
        try:
            control_plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=BROKEN)
        except KubectlError as refused:
            return "exactly one of maxSteps and epochs" in str(refused)
        return False

    control_plane.kubectl("apply", "--server-side=false", "-f", DEFINITION, "-f", PROFILES, "-f", RULES)
    # Not `kubectl wait`: it fails on a definition that has no conditions yet. And clients know names and schemas last.
    until(is_known, waiting_for="kubectl to know the short name and the schema")
    until(is_in_force, waiting_for="the API server to ask the policy of the rules")
    return DEFINITION
