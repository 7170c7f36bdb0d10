"""Ports for servers that a test is about to start."""

from __future__ import annotations

import random
import socket

# Below those that Linux gives to connections: one of theirs may be taken again before a server listens on it. Above
# those of Kubernetes, and below those of its services.
_FIRST, _LAST = 11_000, 29_999
_random = random.SystemRandom()


def free_port() -> int:
    """A port on which nothing listens, on any address, and which no connection is given."""
    while True:
        port = _random.randint(_FIRST, _LAST)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
            return port
