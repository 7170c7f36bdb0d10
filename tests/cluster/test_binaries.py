"""Programs are taken where they are of the pinned minor version, built where they are not, and missed by name."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.binaries import ETCD, KUBERNETES, BuildError, MissingProgramError, find_or_build

PINNED = KUBERNETES.version
BUILT = Path("cluster") / f"kubernetes-{PINNED}" / "kube-scheduler"

# Takes its time, says what it was asked for, and makes a program out of its linker flags.
GO = """\
echo "$@" >>{log}
[ "$1" = build ] || exit 0
sleep 0.2
while [ "$1" != -o ]; do [ "$1" = -ldflags ] && flags=$2; shift; done
echo "$flags" >"$2"
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on it: $PATH is its folder bin, $KUBEBUILDER_ASSETS assets, the cache cache."""
    for name in ("bin", "assets", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    monkeypatch.setenv("MOEJOB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return path


def scheduler(path: Path, version: str) -> Path:
    return script(path / "kube-scheduler", f"echo Kubernetes v{version}")


def found(report: list[str] | None = None) -> Path:
    said: list[str] = [] if report is None else report
    return find_or_build(["kube-scheduler"], said.append)["kube-scheduler"]


@pytest.mark.parametrize("folder", ["assets", "bin"])
def test_a_program_of_the_pinned_minor_version_is_taken(machine: Path, folder: str) -> None:
    installed = scheduler(machine / folder, f"{PINNED.major}.{PINNED.minor}.0")
    assert found() == installed


def test_the_assets_come_before_the_path(machine: Path) -> None:
    scheduler(machine / "bin", str(PINNED))
    installed = scheduler(machine / "assets", str(PINNED))
    assert found() == installed


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(f"echo Kubernetes v{PINNED.major}.{PINNED.minor - 1}.9", id="the minor version before"),
        pytest.param("echo no version at all", id="no version"),
        pytest.param(f"echo Kubernetes v{PINNED}; exit 1", id="a program that fails"),
    ],
)
def test_what_was_built_before_is_taken_instead_of_another_program(machine: Path, says: str) -> None:
    script(machine / "bin" / "kube-scheduler", says)
    built = machine / "cache" / BUILT
    built.parent.mkdir(parents=True)
    built.touch()
    assert found() == built


def test_without_go_all_that_is_missing_is_named(machine: Path) -> None:
    scheduler(machine / "bin", str(PINNED))
    said = f"etcd {ETCD.version}, kubectl {PINNED}: not in .* nor to be built: there is no go in"
    with pytest.raises(MissingProgramError, match=said):
        find_or_build(["etcd", "kube-scheduler", "kubectl"], print)


def test_a_go_that_is_too_old_says_so(machine: Path) -> None:
    refusal = "go: go.mod requires go >= 1.26.0 (running go 1.22.1; GOTOOLCHAIN=local)"
    script(machine / "bin" / "go", f"echo '{refusal}' >&2; exit 1")
    with pytest.raises(MissingProgramError, match=re.escape(refusal)):
        found()


def test_a_missing_program_is_built_with_its_version(machine: Path) -> None:
    script(machine / "bin" / "go", GO.format(log=machine / "log"))
    report: list[str] = []
    built = found(report)
    assert built == machine / "cache" / BUILT
    assert f"-X k8s.io/component-base/version.gitVersion=v{PINNED} " in built.read_text()
    assert [line.split(" in ")[0] for line in report] == [f"building kube-scheduler {PINNED}", "built kube-scheduler"]


def test_two_runs_at_once_build_once(machine: Path) -> None:
    script(machine / "bin" / "go", GO.format(log=machine / "log"))
    with ThreadPoolExecutor(2) as runs:
        paths = [run.result() for run in [runs.submit(found) for _ in range(2)]]
    assert set(paths) == {machine / "cache" / BUILT}
    assert (machine / "log").read_text().count("build ") == 1


def test_a_build_that_fails_leaves_nothing_and_shows_what_go_said(machine: Path) -> None:
    script(machine / "bin" / "go", '[ "$1" = build ] || exit 0; echo undefined: x; exit 1')
    with pytest.raises(BuildError, match=r"(?s)could not build kube-scheduler .*undefined: x"):
        found()
    assert not (machine / "cache" / BUILT).exists()
