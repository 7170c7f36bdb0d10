"""The cluster's DNS: CoreDNS beside the nodes, at the machine's address; knows Services by way of the API server."""

from __future__ import annotations

import urllib.request
from ipaddress import IPv4Address
from pathlib import Path

from cluster.nodes.kubelet import DOMAIN
from cluster.processes import Process

READY_PORT = 8181
# Answers of a Service that changes are old after a second, as those of pods that wait for one another must be.
SETTINGS = """\
.:53 {{
  bind {address}
  errors
  ready {address}:{ready_port}
  kubernetes {domain} in-addr.arpa {{
    kubeconfig {kubeconfig}
    ttl 1
  }}
}}
"""


class Dns:
    """CoreDNS."""

    def __init__(self, program: Path, address: IPv4Address, kubeconfig: Path, folder: Path) -> None:
        self._ready_url = f"http://{address}:{READY_PORT}/ready"
        settings = folder / "Corefile"
        values = {"address": address, "ready_port": READY_PORT, "domain": DOMAIN, "kubeconfig": kubeconfig}
        settings.write_text(SETTINGS.format(**values))
        self.process = Process("coredns", [program, "-conf", settings], folder)

    def start(self) -> None:
        """Return when it has learnt of every Service."""
        self.process.start()
        self.process.wait_until(self._is_ready)

    def stop(self) -> None:
        """End it."""
        self.process.stop()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._ready_url, timeout=1) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False
