"""Workflows run what they name: steps of others by commit, make targets that exist, images that are signed."""

from __future__ import annotations

import re
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


def test_every_image_that_is_released_is_attested() -> None:
    found = steps(ROOT / ".github" / "workflows" / "release.yaml")
    [images] = [step["run"] for step in found if step.get("id") == "images"]
    released = set(re.findall(r'IMAGES="([^"]*)"', images)[0].split())
    attested = {
        step["with"]["subject-name"].rsplit("moejob-")[1] for step in found if "subject-name" in step.get("with", {})
    }
    assert attested == released
