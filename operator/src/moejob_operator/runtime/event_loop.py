"""The event loop of a replica: uvloop's, which leaves no descriptor of a connection with two owners.

If the server resets a connection before the ClientHello is written, uvloop 0.23 closes the descriptor of a given socket
without telling the socket. The freed socket later closes the same number again, which is another connection by then.
"""

from __future__ import annotations

import socket
from typing import Any

import uvloop


class EventLoop(uvloop.Loop):
    """uvloop's, in which the descriptor of a given socket is the transport's alone."""

    # aiohttp connects sockets by itself and gives them to the loop: each of its connections comes by here.
    async def create_connection(self, *arguments: Any, sock: socket.socket | None = None, **options: Any) -> Any:
        """Connect, or take over a connected socket, which is detached."""
        try:
            return await super().create_connection(*arguments, sock=sock, **options)
        finally:
            # Also after a failure: by then the transport has closed the descriptor, or is about to.
            if sock is not None:
                sock.detach()
