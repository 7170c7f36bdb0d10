"""Stacks of a job's ranks, asked for in each of its pods by a program that runs there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from moejob_api.contract.stacks import STACKS_MODULE, RankStacks
from moejob_client.failures import JobRequestError
from moejob_client.jobs import AsyncClient
from moejob_client.rank_stacks import PodStacks
from pod_log_server import PodLogServer, ServedPod, serve_pod_logs

Story = Callable[[PodLogServer, AsyncClient], Awaitable[None]]

# Two ranks of each pod, and a line of a library between them.
PROGRAM = """
import json, sys
index = int(sys.argv[1][-1])
for rank in (2 * index, 2 * index + 1):
    print(json.dumps({"rank": rank, "pid": 40 + rank, "lines": [f"in step {rank}"], "problem": ""}))
    print("a warning of a library")
"""


def run_story(story: Story) -> None:
    async def served() -> None:
        async with serve_pod_logs() as (server, client), asyncio.timeout(60):
            await story(server, client)

    asyncio.run(served())


async def read_all(client: AsyncClient) -> list[PodStacks]:
    return [pod async for pod in client.stacks("job")]


def ranks_of(first: int) -> tuple[RankStacks, ...]:
    return tuple(RankStacks(rank, 40 + rank, (f"in step {rank}",)) for rank in (first, first + 1))


def test_the_pods_of_the_newest_attempt_are_asked_in_their_order() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        server.modules[STACKS_MODULE] = PROGRAM
        await server.add_pod(ServedPod("old-0", "uid-old", attempt=1))
        await server.add_pod(ServedPod("job-1", "uid-1", index=1, attempt=2, node="node-2"))
        await server.add_pod(ServedPod("job-0", "uid-0", attempt=2))
        assert await read_all(client) == [
            PodStacks("job-0", "node-1", ranks_of(0)),
            PodStacks("job-1", "node-2", ranks_of(2)),
        ]

    run_story(story)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (None, "its ranks cannot be asked: its image is older than this moejob"),
        ("", "no rank runs in it yet"),
        ("raise SystemExit('out of memory')", "its ranks cannot be asked: out of memory"),
    ],
    ids=["older image", "no rank yet", "failure"],
)
def test_a_pod_without_stacks_says_why(program: str | None, problem: str) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        if program is not None:
            server.modules[STACKS_MODULE] = program
        await server.add_pod(ServedPod("job-0", "uid-0"))
        assert await read_all(client) == [PodStacks("job-0", "node-1", (), problem)]

    run_story(story)


def test_a_spare_without_ranks_is_no_problem() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        server.modules[STACKS_MODULE] = ""
        server.spares = 1
        await server.add_pod(ServedPod("job-0", "uid-0"))
        assert await read_all(client) == [PodStacks("job-0", "node-1", ())]

    run_story(story)


def test_a_broken_connection_to_a_pod_holds_up_none_of_the_others() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        server.modules[STACKS_MODULE] = PROGRAM
        server.most_output = 30
        await server.add_pod(ServedPod("job-0", "uid-0"))
        [pod] = await read_all(client)
        assert (pod.ranks, "broke before its program had ended" in pod.problem) == ((), True)

    run_story(story)


def test_without_a_running_pod_the_way_to_the_last_lines_is_named() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        await server.add_pod(ServedPod("job-0", "uid-0", state="terminated"))
        with pytest.raises(JobRequestError, match="no pod of job runs, so there are no stacks; `moejob logs job"):
            await read_all(client)

    run_story(story)


def test_missing_rights_are_one_sentence() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        server.is_denied = True
        await server.add_pod(ServedPod("job-0", "uid-0"))
        with pytest.raises(JobRequestError, match=r"no rights: .* ask for the role"):
            await read_all(client)

    run_story(story)
