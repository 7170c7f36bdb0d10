"""`make kind-demo` on the nodes of this machine: all of it is real but docker and kind, which only note what is asked.

Its images are on the nodes already, and its cluster is theirs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from checkouts import copy_checkout
from cluster.control_plane.releases import Release
from cluster.extent import in_full
from cluster.nodes.cluster import Cluster
from cluster.nodes.training import TRAINING_SECONDS, VALUES, VERSION

pytestmark = [pytest.mark.cluster, pytest.mark.slow, in_full]

STEPS = 12
IMAGES = [f"moejob-{name}:{VERSION}" for name in ("operator", "trainer-cpu")]
STAND_IN = """#!/bin/sh
echo "{name} $*" >>{asked}
[ "$1 $2" != "create cluster" ] || cp {kubeconfig} "$KUBECONFIG"
"""


@dataclass(frozen=True)
class Laptop:
    """A checkout, and programs in $PATH."""

    checkout: Path
    programs: Path
    asked: Path

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        """Return what a person types."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE", "MAKE"))}
        own = {"PATH": f"{self.programs}:{os.environ['PATH']}", "KUBECONFIG": str(self.programs / "config")}
        command = ["make", target]
        return subprocess.run(
            command,
            cwd=self.checkout,
            env=kept | own,
            capture_output=True,
            text=True,
            check=False,
            timeout=TRAINING_SECONDS,
        )


@pytest.fixture
def vacant_nodes(nodes: Cluster, home: Release, tmp_path: Path) -> Iterator[Cluster]:
    """The nodes, before the chart is installed."""
    home.remove()
    yield nodes
    Release(nodes.plane, "moejob-system", tmp_path).remove()
    nodes.plane.kubectl("delete", "persistentvolumeclaims", "--all", "--namespace=default")
    nodes.plane.kubectl("delete", "namespace", "--ignore-not-found", "--wait=false", "moejob-system")
    home.install(VALUES)


@pytest.fixture
def laptop(vacant_nodes: Cluster, tmp_path: Path) -> Laptop:
    checkout, programs, asked = copy_checkout(tmp_path / "checkout"), tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(vacant_nodes.plane.kubeconfig.read_text().replace('"tests"', '"kind-moejob"'))
    for name in ("docker", "kind"):
        (programs / name).write_text(STAND_IN.format(name=name, asked=asked, kubeconfig=kubeconfig))
        (programs / name).chmod(0o755)
    (programs / "kubectl").symlink_to(vacant_nodes.plane.kubectl_command()[0])
    (programs / "helm").symlink_to(vacant_nodes.plane.helm.program)
    shorten(checkout / "examples" / "tiny-sft.yaml")
    return Laptop(checkout, programs, asked)


def shorten(example: Path) -> None:
    """Fewer steps, on as many CPUs as a node here has left."""
    job = yaml.safe_load(example.read_text())
    job["spec"]["training"] |= {"maxSteps": STEPS, "evalEvery": STEPS}
    job["spec"]["checkpoint"] |= {"everySteps": STEPS}
    job["spec"]["resources"] |= {"cpu": 1}
    example.write_text(yaml.safe_dump(job))


def test_the_demo_for_docker_builds_installs_trains_and_asks_the_model(laptop: Laptop) -> None:
    done = laptop.make("kind-demo")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    asked = laptop.asked.read_text().splitlines()
    assert "kind create cluster --name moejob --wait 5m" in asked
    builds = [line for line in asked if line.startswith("docker buildx build")]
    assert all(any(image in build for build in builds) for image in IMAGES), asked
    assert f"kind load docker-image --name moejob {' '.join(IMAGES)}" in asked
    table, _, answer = done.stdout.partition("the export, and what the model answers:\n")
    assert "Succeeded" in table
    assert "model.safetensors" in answer
    assert "count from 2 to 5\n" in answer
