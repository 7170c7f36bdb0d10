"""Logs of a job: every line once, in the order of time, through broken connections and pods that come and go."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from moejob_client import pod_logs, watching
from moejob_client.failures import JobRequestError
from moejob_client.jobs import AsyncClient
from moejob_client.log_lines import LogLine, LogMerger, parse_log_line
from moejob_client.log_selection import ALL_LINES, LogSelection
from pod_log_server import PodLogServer, ServedPod, serve_pod_logs

Story = Callable[[PodLogServer, AsyncClient], Awaitable[None]]


def run_story(story: Story) -> None:
    async def served() -> None:
        async with serve_pod_logs() as (server, client):
            async with asyncio.timeout(60):
                await story(server, client)

    asyncio.run(served())


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_logs, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(watching, "_PAUSE_SECONDS", 0.01)


async def read_all(
    client: AsyncClient, selection: LogSelection = ALL_LINES, is_followed: bool = False
) -> list[LogLine]:
    return [line async for line in client.logs("job", selection, is_followed=is_followed)]


def follow(client: AsyncClient, selection: LogSelection = ALL_LINES) -> asyncio.Task[list[LogLine]]:
    return asyncio.create_task(read_all(client, selection, is_followed=True))


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def two_pods() -> tuple[ServedPod, ServedPod]:
    return ServedPod("job-0", "uid-0"), ServedPod("job-1", "uid-1", index=1, node="node-2")


async def write_turns(server: PodLogServer, pods: tuple[ServedPod, ...], count: int) -> None:
    for number in range(count):
        index = number % len(pods)
        await server.write(pods[index], f"[rank {2 * index}] line {number}")


def test_logs_of_all_pods_are_merged_by_time() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        pods = two_pods()
        for pod in pods:
            await server.add_pod(pod)
        await write_turns(server, pods, 30)
        lines = await read_all(client)
        assert texts(lines) == [f"line {number}" for number in range(30)]
        assert [(line.rank, line.node) for line in lines[:2]] == [(0, "node-1"), (2, "node-2")]

    run_story(story)


@pytest.mark.parametrize("seed", range(8))
def test_no_line_is_lost_or_doubled_where_connections_break_at_any_byte(seed: int) -> None:
    """Every connection is cut after a random number of bytes, while both pods write and one is killed."""

    async def story(server: PodLogServer, client: AsyncClient) -> None:
        chance = random.Random(seed)
        server.cuts = itertools.cycle([chance.randrange(1, 700) for _ in range(97)])
        pods = two_pods()
        followed = follow(client)
        for pod in pods:
            await server.add_pod(pod)
        for number in range(200):
            await server.write(pods[number % 2], f"[rank {number % 2 * 2}] same text" if number % 3 else f"{number}")
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01]))
        for pod in pods:
            await server.change_pod(pod, "terminated")
        await server.end_job()
        lines = await followed
        assert server.connections > 10
        for pod in pods:
            seen = [line.nanoseconds for line in lines if line.pod == pod.name]
            assert seen == [time for time, _ in pod.lines]

    run_story(story)


def test_a_followed_log_waits_for_pods_and_goes_on_with_the_one_that_replaces_a_killed_one() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        followed = follow(client)
        first = await server.add_pod(ServedPod("job-0", "uid-old", state="waiting"))
        await asyncio.sleep(0.05)
        await server.change_pod(first, "running")
        await server.write(first, "of the first")
        await asyncio.sleep(0.1)
        await server.delete_pod(first)
        # The same name, and another UID.
        second = await server.add_pod(ServedPod("job-0", "uid-new"))
        await server.write(second, "of the second")
        await server.change_pod(second, "terminated")
        await server.end_job()
        assert texts(await followed) == ["of the first", "of the second"]

    run_story(story)


def test_a_followed_log_begins_with_the_newest_attempt() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        old = await server.add_pod(ServedPod("job-1-0", "old", attempt=1, state="terminated"))
        new = await server.add_pod(ServedPod("job-2-0", "new", attempt=2, state="terminated"))
        await server.write(old, "old")
        await server.write(new, "new")
        await server.end_job()
        assert texts(await follow(client)) == ["new"]
        assert texts(await read_all(client)) == ["new"]
        assert texts(await read_all(client, LogSelection(is_previous=True))) == ["old"]
        assert texts(await read_all(client, LogSelection(attempt=1))) == ["old"]

    run_story(story)


def test_lines_are_chosen_by_rank_and_node() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        pods = two_pods()
        for pod in pods:
            await server.add_pod(pod)
        await write_turns(server, pods, 4)
        await server.write(pods[1], "[rank 3] other rank")
        assert texts(await read_all(client, LogSelection(rank=2))) == ["line 1", "line 3"]
        # Two ranks in a pod: the pod of rank 2 alone is asked.
        assert server.connections == 1
        assert texts(await read_all(client, LogSelection(node="node-1"))) == ["line 0", "line 2"]

    run_story(story)


def test_lines_of_a_rank_are_looked_for_in_every_pod_where_spares_may_have_taken_places() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        server.status["layout"]["spares"] = 1
        spare = await server.add_pod(ServedPod("job-2", "uid-2", index=2))
        await server.write(spare, "[rank 1] in place of a lost pod")
        assert texts(await read_all(client, LogSelection(rank=1))) == ["in place of a lost pod"]

    run_story(story)


def test_lines_of_the_last_failure_are_chosen() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        pods = two_pods()
        for pod in pods:
            await server.add_pod(pod)
        await write_turns(server, pods, 4)
        failure = {"time": "2026-01-01T00:00:00Z", "pod": "job-1", "rank": 2, "reason": "RankFailed"}
        server.status |= {"lastFailure": failure}
        assert texts(await read_all(client, LogSelection(is_failed=True))) == ["line 1", "line 3"]

    run_story(story)


def test_without_a_failure_there_is_none_to_show() -> None:
    async def story(_: PodLogServer, client: AsyncClient) -> None:
        with pytest.raises(JobRequestError, match="no failure of job is known; leave out --failed"):
            await read_all(client, LogSelection(is_failed=True))

    run_story(story)


def test_without_pods_a_log_that_is_not_followed_says_so() -> None:
    async def story(_: PodLogServer, client: AsyncClient) -> None:
        with pytest.raises(JobRequestError, match="`moejob logs -f` waits for them"):
            await read_all(client)

    run_story(story)


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_log_that_may_not_be_read_is_one_sentence(is_followed: bool) -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        server.is_denied = True
        await server.add_pod(ServedPod("job-0", "uid-0"))
        await server.end_job()
        with pytest.raises(JobRequestError, match="cannot read the log of job-0: no rights"):
            await read_all(client, is_followed=is_followed)

    run_story(story)


def test_a_reader_that_leaves_ends_all_tasks() -> None:
    async def story(server: PodLogServer, client: AsyncClient) -> None:
        pod = await server.add_pod(ServedPod("job-0", "uid-0"))
        await server.write(pod, "first")
        async with aclosing(client.logs("job", is_followed=True)) as lines:
            assert (await anext(lines)).text == "first"
        assert [task for task in asyncio.all_tasks() if "moejob_client" in str(task.get_coro())] == []

    run_story(story)


def test_a_silent_log_does_not_hold_up_another() -> None:
    async def story() -> None:
        merger = LogMerger(patience_seconds=0.05)
        merger.add_log("silent")
        merger.add_log("loud")

        async def lines(silence: asyncio.Event | None) -> AsyncIterator[LogLine]:
            if silence is not None:
                await silence.wait()
            yield LogLine(1, "pod", "node", "text")

        ended = asyncio.Event()
        tasks = [
            asyncio.create_task(merger.feed_log("silent", lines(ended))),
            asyncio.create_task(merger.feed_log("loud", lines(None))),
        ]
        async with asyncio.timeout(5), aclosing(merger.merge_logs()) as merged:
            await anext(merged)
            ended.set()
        await asyncio.gather(*tasks)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"2026-01-01T00:00:00.5Z [rank 12] [rank 3] x", (500_000_000, 12, "[rank 3] x")),
        (b"2026-01-01T02:00:00.000000001+02:00 launcher", (1, None, "launcher")),
        (b"2026-01-01T00:00:00Z", (0, None, "")),
        (b"2026-01-01T00:00:00Z \xff", (0, None, "\\xff")),
    ],
)
def test_a_line_is_read_with_its_time_and_rank(line: bytes, expected: tuple[int, int | None, str]) -> None:
    found = parse_log_line(line, "pod", "node")
    assert found is not None
    start = 1_767_225_600 * 10**9
    assert (found.nanoseconds - start, found.rank, found.text) == expected


def test_a_line_without_a_time_is_none() -> None:
    assert parse_log_line(b"rpc error: code = NotFound", "pod", "node") is None
