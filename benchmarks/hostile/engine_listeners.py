"""The port of an engine in a process of its own, for benchmarks.hostile: uvicorn, the guard, and no vLLM behind it."""

from __future__ import annotations

import asyncio

import uvloop

from benchmarks.hostile.probe import GapProbe, serve_until_told
from moejob_rollout.listener import StrangerLimits
from rollout.served import EngineServer


async def main() -> None:
    """Serve until standard input ends."""
    probe, server = GapProbe(), EngineServer(StrangerLimits())
    # Its first token.
    server.client.may_answer.set()

    def begin() -> None:
        probe.gap_seconds = 0.0

    serving = asyncio.create_task(server.serve())
    await asyncio.to_thread(server.began.wait)
    watching = asyncio.create_task(probe.run_in_loop())
    await asyncio.to_thread(serve_until_told, server.port, lambda: probe.gap_seconds, begin)
    watching.cancel()
    serving.cancel()


if __name__ == "__main__":
    uvloop.run(main())
