"""`moejob run` from a planned job to its exit code."""

from __future__ import annotations

from pathlib import Path

from moejob_api.contract.pods import ExitCode, RunFile
from moejob_api.layout.sizes import Layout
from moejob_cli.inputs import PlannedJob
from moejob_cli.running.display import RunDisplay
from moejob_cli.running.folder import HeldRunFolder, held
from moejob_cli.running.launchers import RunOf
from moejob_cli.running.machine import CannotRun, LocalMachine, must_fit, require_room, require_sources, this_machine
from moejob_cli.running.processes import Launching
from moejob_cli.running.steps import StepLine, StepLog
from moejob_cli.running.supervision import Result, Supervision

RUNS = Path("runs")


def run(
    answer: PlannedJob, layout: Layout, folder: Path | None, display: RunDisplay
) -> tuple[Result, list[StepLine], Path]:
    """Run an accepted job on this machine; return its result, its steps and its run folder."""
    name = answer.job.metadata.name
    place = (folder or RUNS / name).absolute()
    try:
        machine = this_machine()
        must_fit(answer.job.spec, layout, machine)
        require_sources(answer.job.spec)
        with held(place, name) as mine:
            if answer.plan.volume is not None:
                require_room(answer.plan.volume.at_least(answer.job.spec), place)
            of = RunOf(name, mine.owner.uid, answer.job.spec, layout, place, mine.secret)
            return _supervised(of, machine, mine, display)
    except CannotRun as refused:
        return Result(ExitCode.BAD_CONFIGURATION, str(refused)), [], place


def _supervised(
    of: RunOf, machine: LocalMachine, mine: HeldRunFolder, display: RunDisplay
) -> tuple[Result, list[StepLine], Path]:
    log = StepLog(of.folder / RunFile.STEPS)
    result = Supervision(of, machine, Launching(machine.python, mine), display, log).run()
    log.read()
    return result, log.lines, of.folder
