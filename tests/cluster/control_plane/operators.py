"""Operator processes as the chart's pods would run them: its service account, its rights, its settings.

Knows not what they decide.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charts import Object, RenderedChart, Values
from cluster.control_plane.plane import ControlPlane
from cluster.processes import Process
from cluster.waiting import until
from ports import free_port

ACCOUNT = "moejob-operator"
# Of the chart, what a process needs that runs outside the cluster.
RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Lease", "Secret")
# Importing takes a second or two, on a machine that is busy half a minute.


@dataclass
class Operator:
    """One replica: a real process, its ports, and what it says of itself."""

    process: Process
    port: int
    webhook_port: int

    def start(self) -> None:
        """Run it, and return when it answers."""
        self.process.start()
        self.process.wait_until(lambda: self.said("/healthz") is not None)

    def said(self, path: str) -> str | None:
        """Return what it answers with 200; None otherwise."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return None

    @property
    def is_ready(self) -> bool:
        return self.said("/readyz") is not None

    @property
    def leads(self) -> bool:
        return "\nmoejob_leading 1.0\n" in (self.said("/metrics") or "")

    def metric(self, name: str) -> float:
        """The sum of all samples of a name."""
        lines = (self.said("/metrics") or "").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.partition("{")[0].split(" ")[0] == name)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def log(self) -> list[dict[str, Any]]:
        """Every line it has written, and that each is JSON."""
        return [json.loads(line) for line in self.process.log.read_text().splitlines()]


@dataclass
class Home:
    """An installation of the operator: a namespace, and what the chart puts into it."""

    plane: ControlPlane
    chart: RenderedChart
    namespace: str
    folder: Path
    replicas: list[Operator] = field(default_factory=list)

    def replica(
        self, *flags: str, environment: Mapping[str, str] | None = None, kubeconfig: Path | None = None
    ) -> Operator:
        """A further replica, not started; unless given another it speaks to the API server itself."""
        number = len(self.replicas)
        port, webhook_port = free_port(), free_port()
        name = f"operator-{self.namespace}-{number}"
        arguments = [
            f"--kubeconfig={kubeconfig or self.plane.service_account_kubeconfig(self.namespace, ACCOUNT)}",
            f"--own-namespace={self.namespace}",
            f"--identity=replica-{number}",
            f"--http-port={port}",
            f"--webhook-port={webhook_port}",
            *flags,
        ]
        variables = [f"{key}={value}" for key, value in (self.chart.environment | dict(environment or {})).items()]
        command = ["env", *variables, sys.executable, "-m", "moejob_operator", *arguments]
        return self._made(Operator(Process(name, command, self.folder), port, webhook_port))

    def replica_of_kopf(self) -> Operator:
        """A further replica, not started, as people run it who develop operators: by kopf's own command."""
        port, webhook_port = free_port(), free_port()
        settings = {
            "KUBECONFIG": self.plane.service_account_kubeconfig(self.namespace, ACCOUNT),
            "OWN_NAMESPACE": self.namespace,
            "IDENTITY": f"replica-{len(self.replicas)}",
            "HTTP_PORT": port,
            "WEBHOOK_PORT": webhook_port,
        }
        variables = [f"{key}={value}" for key, value in self.chart.environment.items()]
        variables += [f"MOEJOB_OPERATOR_{key}={value}" for key, value in settings.items()]
        command = [*variables, sys.executable, "-m", "kopf", "run", "-m", "moejob_operator", "--all-namespaces"]
        name = f"operator-{self.namespace}-{len(self.replicas)}"
        return self._made(Operator(Process(name, ["env", *command], self.folder), port, webhook_port))

    def _made(self, made: Operator) -> Operator:
        self.replicas.append(made)
        return made

    @property
    def leaders(self) -> list[Operator]:
        return [replica for replica in self.replicas if replica.leads]

    def leader(self) -> Operator:
        """The one that leads, as soon as one does."""
        [found] = until(lambda: self.leaders, waiting_for=self.tails)
        return found

    def tails(self) -> str:
        """The last lines of every replica, for when something did not happen."""
        return "\n".join(
            line for replica in self.replicas for line in replica.process.log.read_text().splitlines()[-15:]
        )


# Jobs of tests live in the namespace of the operator, which goes with all of them.
SERVES_ITS_OWN: Values = {"serveOwnNamespace": True}


@contextmanager
def installed(plane: ControlPlane, namespace: str, folder: Path, values: Values | None = None) -> Iterator[Home]:
    """The chart's account and rights; on the way out its processes end and its rights with them."""
    home = Home(plane, plane.helm.render({**SERVES_ITS_OWN, **(values or {})}, namespace), namespace, folder)
    rights = grant(home)
    try:
        yield home
    finally:
        for replica in home.replicas:
            replica.process.stop()
        plane.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=rights)


def grant(home: Home) -> str:
    """Give the account its rights. Returns them, for kubectl to take away again."""
    rights = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(_rights(home.chart))})
    home.plane.kubectl("apply", "-f", "-", stdin=rights)
    return rights


def _rights(chart: RenderedChart) -> Iterator[Object]:
    """Those of the operator: not what its test may do, nor its users."""
    for found in chart.objects:
        labels = found["metadata"]["labels"]
        is_for_users = any("aggregate-to" in label for label in labels)
        if found["kind"] in RIGHTS and labels["app.kubernetes.io/component"] == "operator" and not is_for_users:
            yield found
