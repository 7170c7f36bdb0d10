"""`moejob open`: the page of a job of a cluster, from a copy of its run folder's small files on this machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from moejob_cli.board.commands import cache_folder
from moejob_cli.board.run_files import RunFiles
from moejob_cli.board.server import BoardServer
from moejob_cli.exits import CommandExit
from moejob_cli.notices import print_notice
from moejob_client.failures import JobRequestError, RequestFailure
from moejob_client.jobs import AsyncClient
from moejob_client.run_mirror import RunMirror

_REFRESH_SECONDS = 15.0


async def open_page(
    jobs: AsyncClient, name: str, port: int, *, is_served: Callable[[], bool] = lambda: True
) -> CommandExit:
    """Serve the page of a job until Ctrl-C; while pods of it run, the page grows with the run."""
    job = await jobs.get(name)
    with TemporaryDirectory(prefix="moejob-open-") as folder:
        mirror = RunMirror(Path(folder) / job.name)
        mirror.folder.mkdir()
        await jobs.refresh_mirror(job.name, mirror, may_start_pod=True, report=print_notice)
        if not any(path.stat().st_size for path in mirror.folder.rglob("*") if path.is_file()):
            raise JobRequestError(
                RequestFailure.NO_FILE, f"the run folder of {job.name} is empty: no rank has started yet"
            )
        try:
            server = BoardServer([RunFiles(mirror.folder, cache_folder())], port)
        except OSError as error:
            typer.echo(f"error: port {port} cannot be used: {error.strerror}; name another one with --port", err=True)
            return CommandExit.REFUSED
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        typer.echo(server.url)
        try:
            while is_served():
                await asyncio.sleep(_REFRESH_SECONDS)
                await _refresh_copy(jobs, job.name, mirror)
        finally:
            server.shutdown()
            server.server_close()
    return CommandExit.ACCEPTED


async def _refresh_copy(jobs: AsyncClient, name: str, mirror: RunMirror) -> None:
    """Refresh the copy by a pod that runs. What was read stays on the page if the cluster does not answer."""
    try:
        await jobs.refresh_mirror(name, mirror, may_start_pod=False)
    except JobRequestError as error:
        print_notice(f"the page is not refreshed: {error}")
