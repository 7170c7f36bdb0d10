"""The check of `helm test` on the network, against ports of loopback addresses."""

from __future__ import annotations

import asyncio

import pytest

from moejob_operator.reachable import CLOSED_PORT, OPEN_PORT, report_policies, serve_ports


def close_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize(
    ("host", "ports", "expected"),
    [
        pytest.param(
            "127.0.9.1", (), "unknown: whether the network enforces policies: port 8081", id="nothing answers"
        ),
        pytest.param("127.0.9.2", (OPEN_PORT,), "ok: the network enforces policies", id="the closed port is closed"),
        pytest.param(
            "127.0.9.3", (CLOSED_PORT, OPEN_PORT), "but: the network enforces no policies: port 8082", id="both answer"
        ),
        pytest.param("127.0.9.4", (CLOSED_PORT,), "unknown", id="the wrong one alone"),
    ],
)
def test_the_network_is_told_by_what_it_lets_through(host: str, ports: tuple[int, ...], expected: str) -> None:
    async def story() -> str:
        servers = [await asyncio.start_server(close_connection, host, port) for port in ports]
        try:
            return await report_policies(host, 0.1)
        finally:
            for server in servers:
                server.close()

    assert asyncio.run(story()).startswith(expected)


def test_a_network_that_needs_a_moment_is_waited_for() -> None:
    async def story() -> str:
        host = "127.0.9.5"
        serving = asyncio.create_task(serve_ports(host))
        reported = asyncio.create_task(report_policies(host, 10.0))
        await asyncio.sleep(0.2)
        serving.cancel()
        # The policy is there.
        server = await asyncio.start_server(close_connection, host, OPEN_PORT)
        report = await reported
        server.close()
        return report

    assert asyncio.run(story()) == "ok: the network enforces policies"
