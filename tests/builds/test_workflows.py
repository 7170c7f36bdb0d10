"""Workflows run what they name: steps of others by commit, make targets that exist, images that are signed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builds.recipes import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_step_of_others_is_named_by_its_commit(workflow: Path) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [name for name in used if not re.search(r"@[0-9a-f]{40}$", name)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_make_target_that_a_step_runs_is_there(workflow: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    ran = "\n".join(step.get("run", "") for step in steps(workflow))
    for target in re.findall(r"^\s*make ([a-z-]+)", ran, re.MULTILINE):
        assert f"\n{target}:" in makefile


DIGEST = f"docker.io/library/python@sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("docker", "resolved"),
    [
        pytest.param(f"echo {DIGEST}", f"BASE={DIGEST}\nRUNTIME={DIGEST}\n", id="digests"),
        pytest.param("echo", None, id="an image without a digest"),
        pytest.param("echo python:3.11-slim-bookworm", None, id="a tag"),
        pytest.param("exit 1", None, id="a registry that cannot be reached"),
    ],
)
def test_a_release_builds_from_digests_or_not_at_all(tmp_path: Path, docker: str, resolved: str | None) -> None:
    found = steps(ROOT / ".github" / "workflows" / "release.yaml")
    [script] = [step["run"] for step in found if step.get("name") == "Resolve the bases"]
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{docker}\n")
    (tmp_path / "docker").chmod(0o755)
    variables = tmp_path / "variables"
    variables.touch()
    # As GitHub runs it.
    ended = subprocess.run(
        ["/bin/bash", "-e", "-c", script],
        check=False,
        capture_output=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_ENV": str(variables)},
    )
    assert (ended.returncode == 0) is (resolved is not None)
    assert variables.read_text() == (resolved or "")


def test_every_image_that_is_released_is_attested() -> None:
    found = steps(ROOT / ".github" / "workflows" / "release.yaml")
    [images] = [step["run"] for step in found if step.get("id") == "images"]
    released = set(re.findall(r'IMAGES="([^"]*)"', images)[0].split())
    attested = {
        step["with"]["subject-name"].rsplit("moejob-")[1] for step in found if "subject-name" in step.get("with", {})
    }
    assert attested == released
