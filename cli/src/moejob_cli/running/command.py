"""`moejob run` from a planned job to its exit code."""

from __future__ import annotations

from pathlib import Path

from moejob_api.contract.pods import ExitCode, RunFile
from moejob_cli.inputs import PlannedJob
from moejob_cli.running.display import RunDisplay
from moejob_cli.running.folder import HeldRunFolder, hold_run_folder
from moejob_cli.running.launchers import LocalRun
from moejob_cli.running.machine import (
    CannotRun,
    LocalMachine,
    find_local_machine,
    require_capacity,
    require_room,
    require_sources,
)
from moejob_cli.running.processes import LauncherStarter
from moejob_cli.running.steps import StepLine, StepLog
from moejob_cli.running.supervision import RunResult, Supervision

RUNS = Path("runs")


def run_job(
    planned_job: PlannedJob, folder: Path | None, display: RunDisplay
) -> tuple[RunResult, list[StepLine], Path]:
    """Run an accepted job on this machine; return its result, its steps and its run folder."""
    name, layout = planned_job.job.metadata.name, planned_job.plan.layout
    if layout is None:
        raise AssertionError(f"the plan of {name} was accepted without a layout")
    run_folder = (folder or RUNS / name).absolute()
    try:
        machine = find_local_machine()
        require_capacity(planned_job.job.spec, layout, machine)
        require_sources(planned_job.job.spec)
        # Held before the room is measured, which needs a folder that exists.
        with hold_run_folder(run_folder, name) as held_folder:
            if planned_job.plan.volume is not None:
                require_room(planned_job.plan.volume.least_need(planned_job.job.spec), run_folder)
            local_run = LocalRun(
                name, held_folder.owner.uid, planned_job.job.spec, layout, run_folder, held_folder.secret
            )
            return _supervise_run(local_run, machine, held_folder, display)
    except CannotRun as refused:
        return RunResult(ExitCode.BAD_CONFIGURATION, str(refused)), [], run_folder


def _supervise_run(
    local_run: LocalRun, machine: LocalMachine, held_folder: HeldRunFolder, display: RunDisplay
) -> tuple[RunResult, list[StepLine], Path]:
    log = StepLog(local_run.folder / RunFile.STEPS)
    result = Supervision(local_run, machine, LauncherStarter(machine.python, held_folder), display, log).run()
    # Steps that were logged after the last poll of the run.
    log.read()
    return result, log.lines, local_run.folder
