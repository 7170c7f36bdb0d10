"""The store that all launchers of an attempt share: torch's TCPStore, hosted by pod 0. Whatever fails is LostPeers.

Only operations that answer at once are used: one that waits would keep the launcher from its ranks and from signals.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

# How long a store that does not answer is believed in.
_ANSWER = timedelta(seconds=20)


class LostPeers(RuntimeError):
    """The other pods cannot be reached, or do not want this one."""


class Store:
    """Small texts under names. Nothing is ever removed: a name is written once, by whoever comes first."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store

    @classmethod
    def hosted(cls, address: str, port: int) -> Store:
        """A new store on this machine; port 0 takes a free one. It ends with this object."""
        host = address or "localhost"
        with _reaching(f"{host}:{port}"), _listener(address, port) as listener:
            found = listener.getsockname()[1]
            # The store closes it.
            taken = listener.detach()
            return cls(
                TCPStore(host, found, is_master=True, wait_for_workers=False, timeout=_ANSWER, master_listen_fd=taken)
            )

    @classmethod
    def joined(cls, host: str, port: int) -> Store:
        """The store that another pod hosts, which must be listening already."""
        with _reaching(f"{host}:{port}"):
            return cls(TCPStore(host, port, is_master=False, timeout=_ANSWER))

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._store.port
        return port

    def put_first(self, name: str, text: str) -> str:
        """Write it unless it is there already; what is there now."""
        with _reaching(name):
            return self._store.compare_set(name, "", text).decode()

    def get(self, name: str) -> str | None:
        """What is there."""
        with _reaching(name):
            return self._store.get(name).decode() if self._store.check([name]) else None

    def has_all(self, names: Sequence[str]) -> bool:
        """Whether all of them have been written."""
        with _reaching(names[0] if names else "nothing"):
            return not names or self._store.check(list(names))

    def count(self, name: str, more: int = 1) -> int:
        """Add to a counter, which starts at 0; its new value."""
        with _reaching(name):
            return self._store.add(name, more)


def is_listening(host: str, port: int) -> bool:
    """Whether somebody answers there; a name that is not known yet is nobody."""
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


@contextmanager
def _reaching(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        said = str(error).splitlines()[0]
        raise LostPeers(f"the store of the rendezvous does not answer ({what}): {said}") from None


def _listener(address: str, port: int) -> socket.socket:
    if address or not socket.has_dualstack_ipv6():
        return socket.create_server((address, port), backlog=1024)
    return socket.create_server((address, port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
