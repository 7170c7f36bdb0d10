"""python -m moejob_operator.reachable: a pod with one port that a NetworkPolicy opens, and one that it closes.

`helm test` runs it, and asks from another pod which port it reaches: a network may take policies and enforce none, and
no object of the API tells. Knows nothing of the operator.
"""

from __future__ import annotations

import asyncio
import contextlib

OPEN_PORT, CLOSED_PORT = 8081, 8082
_PAUSE_SECONDS = 0.5
# A packet that is dropped is answered never.
_CONNECTION_SECONDS = 3.0


async def serve_ports(host: str | None = None) -> None:
    """Listen on both ports, first on the closed: once the open one answers, only a policy keeps the other silent."""
    async with (
        await asyncio.start_server(_close_connection, host, CLOSED_PORT),
        await asyncio.start_server(_close_connection, host, OPEN_PORT) as server,
    ):
        await server.serve_forever()


async def report_policies(host: str, seconds: float) -> str:
    """Return a line that says whether the network before a host with these ports enforces policies."""
    deadline = asyncio.get_running_loop().time() + seconds
    if not await _await_state(host, OPEN_PORT, True, deadline):
        return f"unknown: whether the network enforces policies: port {OPEN_PORT} of {host} does not answer"
    # A network may need a moment for the policy of a pod that has just started.
    if not await _await_state(host, CLOSED_PORT, False, deadline):
        return (
            f"but: the network enforces no policies: port {CLOSED_PORT} of {host} answers, which a NetworkPolicy "
            "closes; those of operator and jobs keep no stranger out"
        )
    return "ok: the network enforces policies"


async def _await_state(host: str, port: int, is_open: bool, deadline: float) -> bool:
    """Wait until the port answers, or does not; return whether that came in time."""
    while await _can_connect(host, port) is not is_open:
        if asyncio.get_running_loop().time() + _PAUSE_SECONDS > deadline:
            return False
        await asyncio.sleep(_PAUSE_SECONDS)
    return True


async def _can_connect(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECTION_SECONDS)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _close_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_ports())
