"""A watch through outages: they are reported once each, and no change is missed."""

from __future__ import annotations

import asyncio

import pytest

from moejob_client import watching
from moejob_client.failures import JobRequestError
from pod_log_server import serve_pod_logs


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_PAUSE_SECONDS", 0.01)


def test_an_outage_is_reported_once_and_so_is_its_end() -> None:
    async def story() -> None:
        reports: list[str | None] = []
        outage = asyncio.Event()

        def report(reason: str | None) -> None:
            reports.append(reason)
            outage.set()

        async with serve_pod_logs() as (server, client), asyncio.timeout(30):
            events = client.watch("job", report_outage=report)
            assert (await anext(events)).job.phase == "Running"
            await server.set_away(True)
            change = asyncio.ensure_future(anext(events))
            await outage.wait()
            # Time for further tries.
            await asyncio.sleep(0.1)
            assert len(reports) == 1
            assert "check the address" in str(reports[0])
            await server.end_job()
            await server.set_away(False)
            assert (await change).job.phase == "Succeeded"
            assert reports[1:] == [None]
            await events.aclose()

    asyncio.run(story())


def test_a_server_that_never_answered_is_a_failure_and_no_outage() -> None:
    async def story() -> None:
        async with serve_pod_logs() as (server, client):
            await server.set_away(True)
            with pytest.raises(JobRequestError, match="check the address"):
                await anext(client.watch())

    asyncio.run(story())
