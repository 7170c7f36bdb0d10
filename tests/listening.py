"""The addresses at which a process and all that it has started listen, as the kernel says."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_LISTENS = "0A"
_LOOK_SECONDS = 0.2
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass
class Listening:
    """The processes that have been seen to listen, and where."""

    places: dict[int, set[tuple[Address, int]]] = field(default_factory=dict)

    def look(self, pid: int) -> None:
        """Add what listens now."""
        sockets = dict(_listening_sockets())
        for process in _process_tree(pid):
            for inode in _socket_inodes(process) & sockets.keys():
                self.places.setdefault(process, set()).add(sockets[inode])

    @property
    def reachable(self) -> set[tuple[Address, int]]:
        """The places that other machines can reach."""
        return {place for places in self.places.values() for place in places if not _is_loopback(place[0])}


@contextmanager
def watch_process(pid: int) -> Iterator[Listening]:
    """Look at a process, again and again, until the block ends."""
    seen, is_over = Listening(), threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            seen.look(pid)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield seen
    finally:
        is_over.set()
        looking.join()


def _listening_sockets() -> Iterator[tuple[str, tuple[Address, int]]]:
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                address, _, port = fields[1].partition(":")
                yield fields[9], (_parse_address(address), int(port, 16))


def _parse_address(text: str) -> Address:
    # Words of four bytes, each in the order of the machine: little-endian, as all that we run on.
    words = [bytes.fromhex(text[place : place + 8])[::-1] for place in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def _is_loopback(address: Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _process_tree(pid: int) -> set[int]:
    """The process, its children, and theirs."""
    parents = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = {pid}, {pid}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    return found


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found
