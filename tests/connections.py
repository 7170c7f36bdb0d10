"""Clients as listeners see them: one that has sent all it will, and one that sends a byte now and then."""

from __future__ import annotations

import asyncio
import socket


class SentConnection(asyncio.Transport):
    """A client that has sent all it will, and keeps what it is answered."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 8000)})
        self.answer, self.is_closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.answer += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def is_over(client: socket.socket) -> bool:
    """Send one more byte; return whether the server has hung up."""
    try:
        client.sendall(b"a")
        return client.recv(100) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
