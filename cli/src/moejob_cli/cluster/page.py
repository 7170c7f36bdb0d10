"""`moejob open` and `compare`: jobs of a cluster, from copies of their run folders' small files on this machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from moejob_cli.board.commands import cache_folder, open_runs
from moejob_cli.board.run_files import RunFiles
from moejob_cli.board.server import BoardServer
from moejob_cli.exits import CommandExit
from moejob_cli.job_names import is_job_name
from moejob_cli.notices import print_notice
from moejob_client.failures import JobRequestError, RequestFailure
from moejob_client.jobs import AsyncClient
from moejob_client.run_mirror import RunMirror

_REFRESH_SECONDS = 15.0


async def open_page(
    jobs: AsyncClient, names: Sequence[str], port: int, *, is_served: Callable[[], bool] = lambda: True
) -> CommandExit:
    """Serve the page of jobs until Ctrl-C; while pods of them run, the page grows with the runs."""
    with TemporaryDirectory(prefix="moejob-open-") as folder:
        mirrors = [await copy_run(jobs, name, Path(folder)) for name in names]
        try:
            server = BoardServer([RunFiles(mirror.folder, cache_folder()) for mirror in mirrors], port)
        except OSError as error:
            typer.echo(f"error: port {port} cannot be used: {error.strerror}; name another one with --port", err=True)
            return CommandExit.REFUSED
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        typer.echo(server.overlay_url)
        try:
            while is_served():
                await asyncio.sleep(_REFRESH_SECONDS)
                for mirror in mirrors:
                    await _refresh_copy(jobs, mirror)
        finally:
            server.shutdown()
            server.server_close()
    return CommandExit.ACCEPTED


async def compare_jobs(jobs: AsyncClient, names: Sequence[str], show: Callable[[list[RunFiles]], None]) -> CommandExit:
    """Compare runs, of which some are jobs of the cluster and others folders of this machine."""
    with TemporaryDirectory(prefix="moejob-compare-") as folder:
        runs = []
        for name in names:
            if is_job_name(Path(name)):
                mirror = await copy_run(jobs, name, Path(folder))
                runs.append(RunFiles(mirror.folder, cache_folder()))
            else:
                runs += open_runs([Path(name)])
        show(runs)
    return CommandExit.ACCEPTED


async def copy_run(jobs: AsyncClient, name: str, folder: Path) -> RunMirror:
    """Copy the small files of a job's run folder into a new folder of its name."""
    job = await jobs.get(name)
    mirror = RunMirror(folder / job.name)
    # A job may be named twice, as @latest and by its name.
    mirror.folder.mkdir(exist_ok=True)
    await jobs.refresh_mirror(job.name, mirror, may_start_pod=True, report=print_notice)
    if not any(path.stat().st_size for path in mirror.folder.rglob("*") if path.is_file()):
        raise JobRequestError(RequestFailure.NO_FILE, f"the run folder of {job.name} is empty: no rank has started yet")
    return mirror


async def _refresh_copy(jobs: AsyncClient, mirror: RunMirror) -> None:
    """Refresh the copy by a pod that runs. What was read stays on the page if the cluster does not answer."""
    try:
        await jobs.refresh_mirror(mirror.folder.name, mirror, may_start_pod=False)
    except JobRequestError as error:
        print_notice(f"the page is not refreshed: {error}")
