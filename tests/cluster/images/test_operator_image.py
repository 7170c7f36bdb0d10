"""The operator's image as the chart's pod runs it, on a real control plane."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.control_plane.operators import ACCOUNT, Home, Operator, installed
from cluster.control_plane.plane import ControlPlane
from cluster.images.conftest import Contains
from cluster.processes import Process
from cluster.waiting import until
from confined import Container
from ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("definition")]

# Everything that the operator imports, and that nothing of what the image leaves out was among it.
IMPORTS = """
import importlib, pkgutil, sys
import moejob_api, moejob_cli, moejob_operator
for package in (moejob_api, moejob_cli, moejob_operator):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(sorted(name for name in sys.modules if ".client.models." in name or ".client.api." in name))
"""


@pytest.fixture
def home(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Home]:
    with installed(control_plane, namespace, tmp_path) as found:
        yield found


def test_an_operator_leads_and_is_ready(home: Home, container: Contains) -> None:
    kubeconfig = home.plane.service_account_kubeconfig(home.namespace, ACCOUNT)
    # The file itself is the owner's alone, and the owner is root.
    readable = home.folder / "credentials"
    readable.mkdir()
    (readable / "kubeconfig").write_bytes(kubeconfig.read_bytes())
    port, webhook_port = free_port(), free_port()
    flags = (
        "--kubeconfig=/credentials/kubeconfig",
        f"--own-namespace={home.namespace}",
        "--identity=in-an-image",
        f"--http-port={port}",
        f"--webhook-port={webhook_port}",
    )
    command = (*home.chart.container["command"], *flags)
    made = container("operator", Container(command, home.chart.environment, {"/credentials": readable}))
    replica = Operator(Process("operator", made.words, home.folder), port, webhook_port)
    home.replicas.append(replica)
    replica.start()
    assert home.leader() is replica
    until(lambda: replica.is_ready, waiting_for=home.tails)


def test_every_module_of_ours_can_be_imported(container: Contains) -> None:
    done = container("operator", Container(("python", "-W", "ignore", "-c", IMPORTS))).run(seconds=300)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_whoever_has_the_image_can_plan(container: Contains) -> None:
    asks = ("python", "-m", "moejob_cli", "plan", "--auto", "--model", "mistralai/Mixtral-8x7B-v0.1")
    done = container("operator", Container((*asks, "--gpus", "16", "--gpu-type", "H100"))).run(seconds=300)
    assert done.returncode == 0, done.stderr
    assert "on 16 H100" in done.stdout


def test_there_is_nothing_to_write_to_and_no_shell(container: Contains) -> None:
    asks = """
import json, os
refused = []
for folder in ("/", "/opt/moejob", "/etc"):
    try:
        open(folder + "/x", "w")
    except OSError as error:
        refused.append(error.strerror)
print(json.dumps([os.getuid(), os.getgid(), os.getgroups(), refused, os.path.exists("/bin/sh")]))
"""
    done = container("operator", Container(("python", "-c", asks))).run(seconds=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [65532, 65532, [65532], ["Read-only file system"] * 3, False]
