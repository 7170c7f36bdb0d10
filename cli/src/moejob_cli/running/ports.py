"""Ports of this machine, reserved for one run even while no process listens on them.

A launcher listens seconds after its port was chosen, and not at all while it is replaced: another program could take
the port. So this module binds each port with SO_REUSEADDR, and never listens. Linux then gives the port to no program
that asks for any free port, and to no outgoing connection. Servers of launchers and engines set SO_REUSEADDR, too, and
so may listen on the port.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack

from moejob_cli.running.launchers import LauncherPorts, host_address

_TRIES = 50


class ReservedPorts:
    """Consecutive ports from `first`, the same on every address; none for a count of 0."""

    def __init__(self, hosts: Iterable[str], count: int = 1) -> None:
        addresses = tuple(hosts)
        self._sockets = ExitStack()
        self.first = 0 if not count else self._reserve_ports(addresses, count)

    def release(self) -> None:
        """Close the sockets that hold the ports."""
        self._sockets.close()

    def _reserve_ports(self, hosts: tuple[str, ...], count: int) -> int:
        for _ in range(_TRIES):
            with ExitStack() as sockets:
                try:
                    first = _bind_port(sockets, hosts[0], 0)
                    places = ((address, first + number) for number in range(count) for address in hosts)
                    for address, port in places:
                        if (address, port) != (hosts[0], first):
                            _bind_port(sockets, address, port)
                except (OSError, OverflowError):
                    continue
                self._sockets = sockets.pop_all()
                return first
        missing_ports = "no port is" if count == 1 else f"no {count} ports in a row are"
        raise OSError(f"{missing_ports} free on all of {', '.join(hosts)}")


class AttemptPorts:
    """The ports of one attempt's launchers, reserved until they are released."""

    def __init__(self, nodes: int, rollout_port: int) -> None:
        self._rendezvous = ReservedPorts([host_address(0)])
        self._progress = ReservedPorts(host_address(index) for index in range(nodes))
        self._master = ReservedPorts([host_address(0)])
        self.numbers = LauncherPorts(self._rendezvous.first, self._progress.first, self._master.first, rollout_port)

    def release(self) -> None:
        """Release the ports of launchers and ranks; engines keep theirs from attempt to attempt."""
        self._master.release()
        self._rendezvous.release()
        self._progress.release()


def _bind_port(stack: ExitStack, address: str, port: int) -> int:
    bound_socket = stack.enter_context(socket.socket())
    bound_socket.bind((address, port))
    # The option follows bind: two reservations that set it earlier could share a port.
    bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    number: int = bound_socket.getsockname()[1]
    return number
