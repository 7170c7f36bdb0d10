"""A machine that can have no nodes is given the reason."""

from __future__ import annotations

import os
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from cluster.nodes.cluster import ADDRESSES, Settings
from cluster.nodes.linux_namespaces import run_command
from cluster.nodes.network import Addresses
from cluster.nodes.obstacles import COMMANDS, find_obstacles

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="whoever is not root is told that, and nothing else")


@needs_root
def test_missing_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_obstacles(Settings()) == [f"no {', '.join(COMMANDS)} in $PATH"]


@needs_root
def test_addresses_that_lead_elsewhere_already_are_named() -> None:
    routes = [route.split() for route in run_command("ip", "-4", "route").splitlines() if Settings().owner not in route]
    taken = next((network for network, *_ in routes if "/" in network), None)
    if taken is None:
        pytest.skip("this machine knows no network")
    settings = Settings(addresses=Addresses(IPv4Network(taken), ADDRESSES.pods))
    assert [reason for reason in find_obstacles(settings) if f"a route to {taken} " in reason]


@pytest.mark.skipif(os.geteuid() == 0, reason="root is who may")
def test_whoever_is_not_root_is_told_that() -> None:
    assert find_obstacles(Settings()) == ["not root"]
