"""Verbs on jobs of a cluster, by the client alone; each ends with an exit code that scripts can tell apart."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from moejob_api.contract.texts import escaped_lines, escaped_text
from moejob_api.job.phase import Phase
from moejob_cli.exits import CommandExit
from moejob_client.failures import JobRequestError, RequestFailure
from moejob_client.job_view import JobEvent, JobView

if TYPE_CHECKING:
    from moejob_api.job import MoETrainingJob
    from moejob_cli.obstacles import JobObstacle
    from moejob_client.jobs import AsyncClient

_EXITS = {
    RequestFailure.NO_JOB: CommandExit.NOT_FOUND,
    RequestFailure.NO_DEFINITION: CommandExit.NOT_FOUND,
    RequestFailure.OLD_DEFINITION: CommandExit.REFUSED,
    RequestFailure.NO_RIGHTS: CommandExit.DENIED,
    RequestFailure.NO_CREDENTIALS: CommandExit.DENIED,
    RequestFailure.NO_SERVER: CommandExit.UNREACHABLE,
    RequestFailure.REFUSED: CommandExit.REFUSED,
    RequestFailure.TAKEN: CommandExit.REFUSED,
    RequestFailure.NO_LOG: CommandExit.NOT_FOUND,
    RequestFailure.NO_FILE: CommandExit.NOT_FOUND,
}
_HEADS = ("NAME", "PHASE", "STEP", "SCORE", "SPEED", "ETA", "WHY", "AGE")
# Widths of a line of `watch`, which has no later line when it prints this one.
_WIDTHS = (32, 11, 15, 10, 10, 8, 20, 5)
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"))


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """The namespace and the context that a command names; None leaves the choice to the kubeconfig."""

    namespace: str | None
    context: str | None


def run_verb(choice: ClusterChoice, verb: Callable[[AsyncClient], Awaitable[CommandExit]]) -> CommandExit:
    """Run a verb with a client; a failure is printed as one message."""

    with reading_no_authorities():
        from moejob_client.connection import connect_client  # noqa: PLC0415 what it takes with it is to be imported here

    async def run_connected() -> CommandExit:
        async with await connect_client(choice.namespace, choice.context) as jobs:
            return await verb(jobs)

    return run_reading(run_connected())


@contextmanager
def reading_no_authorities() -> Iterator[None]:
    """Let TLS contexts that are made meanwhile trust no authority, and read none of the system.

    aiohttp makes one when it is imported, which takes a sixth of the time of a verb. A request to a cluster has a
    context of its own.
    """
    read_authorities = ssl.SSLContext.load_default_certs
    ssl.SSLContext.load_default_certs = _read_nothing  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        ssl.SSLContext.load_default_certs = read_authorities  # type: ignore[method-assign]


def _read_nothing(_context: ssl.SSLContext, _purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> None:
    pass


def run_reading(reading: Coroutine[Any, Any, CommandExit]) -> CommandExit:
    """Run what reads a job or a run; a failure is printed as one message."""
    try:
        return asyncio.run(reading)
    except JobRequestError as error:
        typer.echo(f"error: {escaped_lines(str(error))}", err=True)
        return _EXITS[error.kind]


async def list_named_jobs(jobs: AsyncClient, names: Sequence[str]) -> tuple[JobView, ...]:
    """Return the named jobs, or all of the namespace."""
    return tuple([await jobs.get(name) for name in names]) if names else await jobs.list_jobs()


def job_table(views: Iterable[JobView], now: datetime) -> Iterator[str]:
    """Yield the lines of a table of jobs."""
    rows = [_HEADS, *(_job_cells(view, now) for view in views)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield _padded_line(row, widths)


async def follow_jobs(jobs: AsyncClient, name: str) -> CommandExit:
    """Print a line for each change; about one job, until it has finished."""
    followed_name = (await jobs.get(name)).name if name else ""
    typer.echo(_padded_line(_HEADS, _WIDTHS))
    async with aclosing(changed_lines(jobs, followed_name)) as changes:
        async for event, line in changes:
            typer.echo(line)
            if followed_name and (event.is_gone or event.job.is_finished):
                return CommandExit.ACCEPTED if event.job.phase is Phase.SUCCEEDED else CommandExit.REFUSED
    return CommandExit.ACCEPTED


async def changed_lines(jobs: AsyncClient, name: str) -> AsyncGenerator[tuple[JobEvent, str]]:
    """Yield the line of each change that shows: heartbeats that change no cell print nothing."""
    shown: dict[str, tuple[str, ...]] = {}
    async with aclosing(jobs.watch(name, report_outage=_report_outage)) as events:
        async for event in events:
            cells = _job_cells(event.job, datetime.now(UTC))
            if event.is_gone:
                shown.pop(event.job.name, None)
                yield event, _padded_line((cells[0], "Deleted", *cells[2:]), _WIDTHS)
            elif shown.get(event.job.name) != cells[:-1]:
                # The age alone is no change.
                shown[event.job.name] = cells[:-1]
                yield event, _padded_line(cells, _WIDTHS)


def _report_outage(reason: str | None) -> None:
    """Say on standard error that nothing is seen for a while, and that it is over."""
    typer.echo("the API server answers again" if reason is None else f"{escaped_lines(reason)}; trying again", err=True)


async def find_cluster_obstacles(jobs: AsyncClient, names: Sequence[str]) -> tuple[JobObstacle, ...]:
    """Return the obstacle of each named job, from what the namespace holds."""
    from moejob_cli.obstacles import find_obstacles  # noqa: PLC0415 the other verbs do not wait for the diagnosis

    evidence = await jobs.list_evidence(await list_named_jobs(jobs, names))
    if evidence.unread:
        kinds = ", ".join(evidence.unread)
        typer.echo(
            f"note: your rights do not let you list {kinds}, so the answer may miss what they say; ask for the role "
            f"view in {jobs.namespace}",
            err=True,
        )
    return find_obstacles(evidence.objects, datetime.now(UTC))


async def submit_jobs(
    jobs: AsyncClient, described_jobs: Sequence[MoETrainingJob], *, dry_run: bool, follow: bool
) -> CommandExit:
    """Create jobs, and follow the first if asked."""
    for job in described_jobs:
        uid = await jobs.submit(job, dry_run=dry_run)
        result = "the cluster would accept it; nothing was created" if dry_run else f"created ({uid})"
        typer.echo(f"{jobs.namespace}/{job.metadata.name}: {result}")
    return await follow_jobs(jobs, described_jobs[0].metadata.name) if follow and not dry_run else CommandExit.ACCEPTED


def follow_words(command: str) -> str:
    """Return the words that say how to come back after Ctrl-C."""
    return f"detached: the job continues; `{command}` comes back"


def _job_cells(view: JobView, now: datetime) -> tuple[str, ...]:
    display = [view.status_text("display", key) for key in ("step", "score", "speed", "eta")]
    phase = view.status_text("phase") or "New"
    texts = (view.name, phase, *display, view.status_text("why", "blocker"), _age_text(view.created_at, now))
    return tuple(escaped_text(text) for text in texts)


def _age_text(created_at: datetime | None, now: datetime) -> str:
    if created_at is None:
        return ""
    seconds = max(0, int((now - created_at).total_seconds()))
    return next((f"{seconds // size}{unit}" for size, unit in _UNITS if seconds >= size), f"{seconds}s")


def _padded_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
