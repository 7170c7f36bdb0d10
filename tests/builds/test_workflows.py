"""Workflows run what they name: steps of others by commit, make targets that exist, images that are signed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
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
    scripts = "\n".join(step.get("run", "") for step in steps(workflow))
    for target in re.findall(r"^\s*make ([a-z-]+)", scripts, re.MULTILINE):
        assert f"\n{target}:" in makefile


RELEASE = steps(ROOT / ".github" / "workflows" / "release.yaml")
DIGEST = f"sha256:{'a' * 64}"
PREFIX, TAG = "ghcr.io/team/moejob", f"v{(ROOT / 'VERSION').read_text().strip()}"


def ran(tmp_path: Path, script: str, programs: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a script as GitHub does, with these programs; its end, what it wrote for later steps, and calls in order."""
    for name, content in programs.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"$LOG"\n{content}\n')
        (tmp_path / name).chmod(0o755)
    variables = {name: tmp_path / name.lower() for name in ("GITHUB_OUTPUT", "LOG")}
    for file in variables.values():
        file.touch()
    ended = subprocess.run(
        ["/bin/bash", "-e", "-c", re.sub(r"\$\{\{.*?\}\}", "", script)],
        check=False,
        capture_output=True,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PREFIX": PREFIX, "TAG": TAG}
        | {name: str(file) for name, file in variables.items()},
    )
    return ended.returncode, variables["GITHUB_OUTPUT"].read_text(), variables["LOG"].read_text()


def test_a_release_without_the_digests_of_its_bases_ends_before_it_builds() -> None:
    said = [step.get("run", "") for step in RELEASE]
    checks, builds = (next(i for i, run in enumerate(said) if word in run) for word in ("make bases", "make images"))
    assert said[checks] == "make bases ARGS=--check"
    assert checks < builds
    # By which a build would take others.
    assert not re.search(r"\b(BASE|RUNTIME)=", "\n".join(said))


def test_images_are_pushed_under_the_tag_that_the_chart_asks_for(tmp_path: Path) -> None:
    [script] = [step["run"] for step in RELEASE if step.get("id") == "images"]
    docker = f'[ "$1" = push ] || echo {PREFIX}/an-image@{DIGEST}'
    code, outputs, log = ran(tmp_path, script, {"docker": docker, "make": ""})
    assert code == 0
    assert outputs == "".join(f"{image}={DIGEST}\n" for image in ("operator", "trainer", "rollout"))
    version = yaml.safe_load((ROOT / "charts/moejob/Chart.yaml").read_text())["appVersion"]
    pushed = [line.removeprefix("docker push ") for line in log.splitlines() if line.startswith("docker push")]
    assert pushed == [f"{PREFIX}/moejob-{image}:{version}" for image in ("operator", "trainer", "rollout")]


@pytest.mark.parametrize(
    ("push", "outputs"),
    [
        # As helm says it.
        pytest.param(f'echo "Pushed: moejob:1" >&2; echo "Digest: {DIGEST}" >&2', f"digest={DIGEST}\n", id="a digest"),
        pytest.param("exit 1", None, id="a registry that takes none"),
        pytest.param('echo "Pushed: moejob:1"', None, id="no digest"),
        pytest.param('echo "Digest: latest"', None, id="something else"),
    ],
)
def test_a_chart_is_released_by_its_digest_or_not_at_all(tmp_path: Path, push: str, outputs: str | None) -> None:
    [script] = [step["run"] for step in RELEASE if step.get("id") == "chart"]
    code, wrote, _ = ran(tmp_path, script, {"helm": f'[ "$1" != push ] || {{ {push}; }}'})
    assert (code == 0) is (outputs is not None)
    assert wrote == (outputs or "")


def test_the_chart_is_signed_by_its_digest(tmp_path: Path) -> None:
    [step] = [step for step in RELEASE if step.get("name") == "Sign the chart"]
    assert step["env"] == {"DIGEST": "${{ steps.chart.outputs.digest }}"}
    _, _, log = ran(tmp_path, f"DIGEST={DIGEST}\n{step['run']}", {"cosign": ""})
    assert log == f"cosign sign --yes {PREFIX}/charts/moejob@{DIGEST}\n"


def test_everything_that_is_pushed_is_attested_by_its_digest() -> None:
    [images] = [step["run"] for step in RELEASE if step.get("id") == "images"]
    released = {
        f"${{{{ env.PREFIX }}}}/moejob-{image}": f"${{{{ steps.images.outputs.{image} }}}}"
        for image in re.findall(r'IMAGES="([^"]*)"', images)[0].split()
    }
    attested = {
        step["with"]["subject-name"]: step["with"]["subject-digest"]
        for step in RELEASE
        if "subject-name" in step.get("with", {})
    }
    chart = {"${{ env.PREFIX }}/charts/moejob": "${{ steps.chart.outputs.digest }}"}
    assert attested == released | chart
