"""Workflows run to their end beside stand-ins of the world outside: images and chart are pushed and signed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkouts import copy_checkout
from image_builds.bases import main as write_bases
from image_builds.recipes import ROOT
from workflow_emulation import Emulation, write_stand_ins

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


RELEASE, IMAGES, BASES = (ROOT / ".github" / "workflows" / f"{name}.yaml" for name in ("release", "images", "bases"))
DIGEST = f"sha256:{'a' * 64}"
PREFIX, TAG = "ghcr.io/team/moejob", f"v{(ROOT / 'VERSION').read_text().strip()}"
CONTEXT = {
    "github.token": "a-token",
    "github.actor": "octocat",
    "github.repository": "team/moejob",
    "github.ref": f"refs/tags/{TAG}",
    "github.ref_name": TAG,
}
PARTS = ("crds", "client", "cli", "operator", "trainer", "rollout")
RELEASED = ("operator", "trainer", "trainer-colocated", "rollout")
PUSHED = f'[ "$1" != inspect ] || echo {PREFIX}/an-image@{DIGEST}'
# As helm says it.
CHART = f'[ "$1" != push ] || {{ echo "Pushed: moejob:1" >&2; echo "Digest: {DIGEST}" >&2; }}'
# Of the world outside, which a test must not touch; make, git and the scripts of this tree are the real ones.
OUTSIDE = {"docker": PUSHED, "helm": CHART, "cosign": "", "gh": "", "sudo": "", "kind": "", "kubectl": ""}


@pytest.fixture
def emulate(tmp_path: Path) -> Callable[..., Emulation]:
    """A workflow in a copy of this checkout; a base without a digest there has none."""

    def emulation(workflow: Path, *, has_bases: bool = True, **programs: str) -> Emulation:
        checkout = copy_checkout(tmp_path / "checkout")
        if has_bases:
            assert write_bases([], checkout, lambda _: DIGEST) == 0
        stand_ins = write_stand_ins(tmp_path / "stand-ins", OUTSIDE | programs)
        # scripts/uv takes it for the one that it has fetched before.
        pinned = re.search(r"^uv==(\S+)", (ROOT / "requirements" / "uv.txt").read_text(), re.MULTILINE)
        assert pinned is not None
        write_stand_ins(stand_ins / ".cache" / "moejob" / f"uv-{pinned[1]}" / "bin", {"uv": ""} | programs)
        return Emulation(workflow, checkout, stand_ins, CONTEXT)

    return emulation


# --- release --------------------------------------------------------------------------------------------------------


def test_a_release_without_the_digests_of_its_bases_ends_with_that_sentence_and_pushes_nothing(
    emulate: Callable[..., Emulation],
) -> None:
    release = emulate(RELEASE, has_bases=False)
    [bases] = release.run()
    assert bases.failed
    assert "has no digest in images/bases.txt; run the workflow bases" in bases.output
    assert release.calls() == []


def test_a_release_pushes_and_signs_each_image_of_the_chart_by_its_digest(emulate: Callable[..., Emulation]) -> None:
    release = emulate(RELEASE)
    jobs = release.run()
    assert [job.name for job in jobs if job.failed] == []
    assert [job.name for job in jobs] == ["bases", *(f"image {image}" for image in RELEASED), "packages", "chart"]
    calls = release.calls()
    version = yaml.safe_load((ROOT / "charts/moejob/Chart.yaml").read_text())["appVersion"]
    named = yaml.safe_load((ROOT / "charts/moejob/values.yaml").read_text())["images"]
    wanted = {named[name] for name in ("operator", "trainer", "trainerColocated", "rollout")}
    pushed = [call.removeprefix("docker push ") for call in calls if call.startswith("docker push ")]
    assert {*pushed} == {f"{PREFIX}/{image}:{version}" for image in wanted}
    signed = [call.removeprefix("cosign sign --yes ") for call in calls if call.startswith("cosign")]
    assert {*signed} == {f"{PREFIX}/{image}@{DIGEST}" for image in wanted} | {f"{PREFIX}/charts/moejob@{DIGEST}"}


def test_a_release_publishes_each_package_once_all_images_are_there(emulate: Callable[..., Emulation]) -> None:
    release = emulate(RELEASE)
    release.run()
    calls = [call for call in release.calls() if call.startswith("uv ")]
    built = [call.split()[-1] for call in calls if " build --wheel " in call]
    assert built == [file.parent.name for name in PARTS for file in ROOT.glob(f"{name}/pyproject.toml")]
    assert len(built) == len(list(ROOT.glob("*/pyproject.toml"))) == 6
    assert all(
        "--require-hashes --build-constraints requirements/tools.txt --out-dir dist" in call for call in calls[:6]
    )
    # No token: PyPI trusts the workflow.
    [publishing] = calls[6:]
    assert publishing.startswith("uv publish --trusted-publishing always --check-url https://pypi.org/simple/ dist/")
    last_push = max(index for index, call in enumerate(release.calls()) if call.startswith("docker push"))
    assert release.calls().index(calls[0]) > last_push


def test_a_package_that_cannot_be_built_is_not_published(emulate: Callable[..., Emulation]) -> None:
    release = emulate(RELEASE, uv='[[ "$*" != *build*operator ]]')
    assert "packages" in [job.name for job in release.run() if job.failed]
    assert not any("uv publish" in call for call in release.calls())


def test_images_are_built_on_the_digests_of_their_bases(emulate: Callable[..., Emulation]) -> None:
    release = emulate(RELEASE)
    release.run()
    builds = [call for call in release.calls() if call.startswith("docker buildx build")]
    assert len(builds) == len(RELEASED)
    assert all("--build-arg BASE=docker.io/library/python:" in call and f"@{DIGEST}" in call for call in builds)


def test_the_notes_of_a_release_are_those_of_its_version(emulate: Callable[..., Emulation]) -> None:
    release = emulate(RELEASE)
    release.run()
    assert release.calls()[-1] == f"gh release create {TAG} --title {TAG} --notes-file notes.md moejob-{TAG[1:]}.tgz"
    notes = (release.checkout / "notes.md").read_text()
    assert "\n## " not in notes
    assert notes.strip() in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("broken", ["an-image", f"{PREFIX}/an-image@latest"], ids=["no digest", "something else"])
def test_an_image_without_a_digest_ends_the_release_before_its_chart(
    emulate: Callable[..., Emulation], broken: str
) -> None:
    release = emulate(RELEASE, docker=f'[ "$1" != inspect ] || echo {broken}')
    jobs = release.run()
    assert [job.name for job in jobs if job.failed] == [f"image {image}" for image in RELEASED]
    assert not any(call.startswith(("helm", "cosign", "gh")) for call in release.calls())


@pytest.mark.parametrize(
    "push", ["exit 1", 'echo "Pushed: moejob:1"', 'echo "Digest: latest"'], ids=["refused", "no digest", "another word"]
)
def test_a_chart_is_released_by_its_digest_or_not_at_all(emulate: Callable[..., Emulation], push: str) -> None:
    release = emulate(RELEASE, helm=f'[ "$1" != push ] || {{ {push}; }}')
    assert [job.name for job in release.run() if job.failed] == ["chart"]
    assert not any("charts/moejob@" in call or call.startswith("gh") for call in release.calls())


def test_everything_that_is_pushed_is_attested_by_its_digest() -> None:
    attested = {
        step["with"]["subject-name"]: step["with"]["subject-digest"]
        for step in steps(RELEASE)
        if "subject-name" in step.get("with", {})
    }
    assert attested == {
        "${{ env.PREFIX }}/moejob-${{ matrix.image }}": "${{ steps.image.outputs.digest }}",
        "${{ env.PREFIX }}/charts/moejob": "${{ steps.chart.outputs.digest }}",
    }


# --- bases, images --------------------------------------------------------------------------------------------------


def git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout


def test_bases_are_proposed_once_and_a_proposal_that_is_open_is_renewed(emulate: Callable[..., Emulation]) -> None:
    found = f"echo python:3.11@{DIGEST} >images/bases.txt"
    proposal = emulate(
        BASES, has_bases=False, make=found, gh='[ "$2" != view ] || [ ! -e "$HOME/is-open" ] || echo OPEN'
    )
    git(proposal.checkout, "init", "--quiet", "--initial-branch=main")
    git(proposal.checkout, "add", ".")
    git(proposal.checkout, "commit", "--quiet", "--message=all")
    git(proposal.checkout, "init", "--quiet", "--bare", "../origin")
    git(proposal.checkout, "remote", "add", "origin", "../origin")
    [job] = proposal.run()
    assert not job.failed, job.output
    assert git(proposal.checkout, "ls-remote", "origin").endswith("refs/heads/bases\n")
    assert git(proposal.checkout, "show", "--name-only", "--format=%s") == (
        "images: take the bases of today\n\nimages/bases.txt\n"
    )
    assert [call.split()[:3] for call in proposal.calls() if call.startswith("gh")][1:] == [["gh", "pr", "create"]]
    (proposal.stand_ins / "is-open").touch()
    (proposal.stand_ins / "log").unlink()
    write_stand_ins(proposal.stand_ins, {"make": f"{found}; echo other:1@{DIGEST} >>images/bases.txt"})
    assert not proposal.run()[0].failed
    assert [call.split()[:3] for call in proposal.calls() if call.startswith("gh")] == [["gh", "pr", "view"]]
    assert "all bases are those of today" in proposal.run()[0].output


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_the_demo_in_kind_is_run_and_a_failure_is_described(emulate: Callable[..., Emulation], phase: str) -> None:
    kubectl = f"[[ $* != *jsonpath=*status.phase* ]] || echo {phase}"
    images = emulate(IMAGES, kubectl=kubectl)
    [job] = images.run()
    assert job.failed is (phase == "Failed"), job.output
    described = [name for name, _ in job.steps if name.startswith("What there was")]
    assert len(described) == (phase == "Failed")
    assert any(call.startswith("kind load docker-image") for call in images.calls())


@pytest.mark.parametrize("name", ["audit", "ci", "docs"])
def test_what_else_workflows_run_can_be_started(name: str) -> None:
    """These take minutes, or ask PyPI: bash reads the script, and make says what it would do."""
    scripts = [step["run"] for step in steps(ROOT / ".github" / "workflows" / f"{name}.yaml") if "run" in step]
    for script in scripts:
        tried = ["bash", "-n", script] if script.startswith(".ci/") else [*script.split(), "--dry-run"]
        subprocess.run(tried, cwd=ROOT, check=True, capture_output=True)
