"""The Python stacks of a job's ranks: each of its running pods asks its own, by a program that runs in it.

The signal never kills: moejob_trainer.launcher.stacks says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moejob_api import api_bodies
from moejob_api.contract.names import PodRole
from moejob_api.contract.stacks import STACKS_MODULE, RankStacks, parse_stacks_line
from moejob_client.failures import JobRequestError, RequestFailure, explained_failures
from moejob_client.job_view import JobView
from moejob_client.pod_exec import ProgramError, RunningContainer, run_program
from moejob_client.pod_logs import PodView

if TYPE_CHECKING:
    from moejob_client.api_client import ApiClient

# Pods that are asked at once: each has a connection.
_MOST_PODS = 16
_ABSENT = "No module named"


@dataclass(frozen=True, slots=True)
class PodStacks:
    """The stacks of the ranks of one pod; `problem`: why there are none."""

    pod: str
    node: str
    ranks: tuple[RankStacks, ...]
    problem: str = ""


async def read_pod_stacks(http: ApiClient, job: JobView, pods: Sequence[PodView]) -> AsyncGenerator[PodStacks]:
    """Yield the stacks of each pod, by index. A pod that cannot be asked holds up none of the others."""
    trainers = [pod for pod in pods if pod.role == PodRole.TRAINER and pod.is_running]
    newest = max((pod.attempt for pod in trainers), default=0)
    chosen = sorted((pod for pod in trainers if pod.attempt == newest), key=lambda pod: pod.index)
    if not chosen:
        text = f"no pod of {job.name} runs, so there are no stacks; `moejob logs {job.name} --failed` prints the last"
        raise JobRequestError(
            RequestFailure.NO_LOG, f"{text} lines of ranks, `moejob why {job.name}` what is in the way"
        )
    room = asyncio.Semaphore(_MOST_PODS)
    tasks = [asyncio.create_task(_read_one_pod(http, job, pod, room)) for pod in chosen]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read_one_pod(http: ApiClient, job: JobView, pod: PodView, room: asyncio.Semaphore) -> PodStacks:
    container = RunningContainer(job.namespace, pod.name, pod.role)
    try:
        async with room:
            ranks = await _run_in_pod(http, container)
    except ProgramError as error:
        reason = "its image is older than this moejob" if _ABSENT in str(error) else str(error)
        return PodStacks(pod.name, pod.node, (), f"its ranks cannot be asked: {reason}")
    except JobRequestError as error:
        if error.kind not in (RequestFailure.NO_SERVER, RequestFailure.NO_JOB):
            raise
        return PodStacks(pod.name, pod.node, (), str(error))
    return PodStacks(pod.name, pod.node, ranks, "" if ranks or _has_spares(job) else "no rank runs in it yet")


def _has_spares(job: JobView) -> bool:
    """Return whether a pod may wait without ranks for the place of a lost one."""
    resources = api_bodies.as_mapping(api_bodies.as_mapping(job.body.get("spec")).get("resources"))
    return bool(api_bodies.as_integer(resources.get("spares")))


async def _run_in_pod(http: ApiClient, container: RunningContainer) -> tuple[RankStacks, ...]:
    output = b""
    with explained_failures(f"cannot run a program in {container.pod}"):
        async with aclosing(run_program(http, container, ["python", "-m", STACKS_MODULE])) as chunks:
            async for chunk in chunks:
                output += chunk
    return tuple(filter(None, map(parse_stacks_line, output.splitlines())))
