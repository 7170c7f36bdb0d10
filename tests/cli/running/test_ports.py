"""Ports of a run: reserved from its first moment, also while no launcher listens on them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from moejob_cli.running.ports import ReservedPorts

HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    reserved = ReservedPorts(HOSTS, 2)
    yield reserved
    reserved.release()


@pytest.mark.parametrize("address", [*HOSTS, ""])
def test_another_program_cannot_take_a_port_before_its_launcher_listens(ports: ReservedPorts, address: str) -> None:
    for number in (0, 1):
        with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
            stranger.bind((address, ports.first + number))


def test_one_launcher_after_another_listens_on_the_same_port(ports: ReservedPorts) -> None:
    for _ in range(2):
        place = (HOSTS[1], ports.first)
        with socket.create_server(place) as listening, socket.create_connection(place):
            # The server's side is closed first: its port stays in TIME_WAIT, as when a launcher is replaced.
            listening.accept()[0].close()


def test_two_runs_never_reserve_the_same_port(ports: ReservedPorts) -> None:
    others = [ReservedPorts(HOSTS) for _ in range(200)]
    assert len({ports.first, ports.first + 1, *(other.first for other in others)}) == 202
    for other in others:
        other.release()


def test_released_ports_are_free_again(ports: ReservedPorts) -> None:
    ports.release()
    with socket.socket() as next_one:
        next_one.bind((HOSTS[0], ports.first))


def test_a_run_without_engines_reserves_nothing_for_them() -> None:
    assert ReservedPorts(HOSTS, 0).first == 0
