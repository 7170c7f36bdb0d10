"""A whole operator process but for its start: how it ends, and what it says of that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest

from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_operator import handlers
from moejob_operator.runtime import process
from moejob_operator.runtime.job_watch import DEAD_SECONDS
from moejob_operator.runtime.lifecycle import Operator
from moejob_operator.runtime.settings import Settings
from ports import free_port
from stand_in_api import StandInServer, list_answer, serve_stand_in

CORE = ("pods", "services", "persistentvolumeclaims")


def serve_everything(server: StandInServer) -> None:
    server.serve_jobs()
    for path in (f"/apis/{GROUP}/{VERSION}/{PLURAL}", *(f"/api/v1/{plural}" for plural in CORE)):
        server.set_answers(f"GET {path}", list_answer())
        server.set_answers(f"GET {path}?watch", (-1, ""))


def settings_for(server: StandInServer, folder: Path, **changes: Any) -> Settings:
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": server.url}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    fixed = {"kubeconfig": kubeconfig, "leader_election": False, "webhook": False, "http_port": 0, "stop_seconds": 5}
    return Settings.model_validate(fixed | changes)


async def until(condition: Callable[[], Any]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def ran(folder: Path, story: Callable[[StandInServer], Awaitable[None]], **changes: Any) -> int:
    """The exit code of a process, to which something happens while it runs."""

    async def run() -> int:
        async with serve_stand_in() as (server, _):
            serve_everything(server)
            running = asyncio.ensure_future(process.run_operator(settings_for(server, folder, **changes)))
            await story(server)
            return await asyncio.wait_for(running, 60)

    return asyncio.run(run())


async def watches_begin(server: StandInServer) -> None:
    await until(lambda: sum("watch" in asked.query for asked in server.requests) == 1 + len(CORE))


def test_a_signal_ends_it_well(tmp_path: Path) -> None:
    async def story(server: StandInServer) -> None:
        await watches_begin(server)
        os.kill(os.getpid(), signal.SIGTERM)

    assert ran(tmp_path, story) == 0


def test_a_part_of_kopf_that_ends_ends_the_process_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(server: StandInServer) -> None:
        # kopf reads its kind.
        server.set_answers("GET /api/v1", (200, {"resources": [{"name": "namespaces"}]}))

    assert ran(tmp_path, story) == 1
    [said] = [record for record in caplog.records if record.getMessage() == "a part of kopf has ended"]
    assert said.__dict__["moejob_fields"] == {"part": "resource observer"}


def test_a_part_of_ours_that_ends_ends_the_process_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(server: StandInServer) -> None:
        # No list can have a version that is no number.
        server.set_answers("GET /api/v1/pods", list_answer(version="later"))

    assert ran(tmp_path, story) == 1
    [said] = [record for record in caplog.records if record.getMessage() == "a part has failed"]
    assert said.__dict__["moejob_fields"] == {"part": "watch of Pod"}


def test_what_cannot_start_ends_the_process(tmp_path: Path) -> None:
    async def story(_: StandInServer) -> None:
        return

    with_a_taken_port = {"http_port": 1, "kubeconfig": tmp_path / "nothing"}
    assert ran(tmp_path, story, **with_a_taken_port) == 1


def test_kopf_and_the_settings_have_to_mean_the_same_namespaces(tmp_path: Path) -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, _):
            memo = kopf.Memo(settings=settings_for(server, tmp_path, namespaces=("a",)))
            everywhere = kopf.OperatorSettings()
            everywhere.peering.clusterwide = True
            with pytest.raises(ValueError, match="kopf watches all namespaces, but MOEJOB_OPERATOR_NAMESPACES is a"):
                await Operator.start(everywhere, memo)

    asyncio.run(story())


def test_alive_is_no_longer_who_has_a_dead_watch_or_has_lost_a_part(tmp_path: Path) -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, _), aiohttp.ClientSession() as client:
            serve_everything(server)
            port = free_port()
            memo = kopf.Memo(settings=settings_for(server, tmp_path, http_port=port))
            clusterwide = kopf.OperatorSettings()
            clusterwide.peering.clusterwide = True
            # kopf passes more, which they do not look at.
            called: Any = handlers
            await called.startup(settings=clusterwide, memo=memo)
            assert await called.probe(memo=memo) == "ok"
            # No kopf runs here: its watch asks nothing.
            [watch] = memo.operator.job_watches
            watch.clock = lambda: asyncio.get_running_loop().time() + 1e6 + DEAD_SECONDS
            with pytest.raises(kopf.PermanentError, match="watch of MoETrainingJob: kopf asks nothing any more"):
                await called.probe(memo=memo)
            url = f"http://127.0.0.1:{port}/healthz"
            async with client.get(url) as said:
                assert said.status == 503
            await called.cleanup(memo=memo)

    asyncio.run(story())
