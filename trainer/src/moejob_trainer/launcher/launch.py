"""A launcher from its environment to its exit code: it never ends without a termination message."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass

from moejob_api.contract.pod_environment import BadEnvironment, read_environment
from moejob_api.contract.pods import ExitCode, PodOutcome, TerminationMessage
from moejob_api.contract.threads import waiting_variables
from moejob_api.job.resources import Accelerator
from moejob_trainer.launcher.agent import Agent
from moejob_trainer.launcher.ending import ExitReport
from moejob_trainer.launcher.engine_processes import PodEngines, engine_commands
from moejob_trainer.launcher.http_server import ProgressServer
from moejob_trainer.launcher.log import LauncherLog, start_logging
from moejob_trainer.launcher.memory import pinned_limit_bytes, pinning_trouble
from moejob_trainer.launcher.options import Options
from moejob_trainer.launcher.pod import TrainerPod
from moejob_trainer.launcher.rank_processes import RankProcesses
from moejob_trainer.launcher.record import LauncherRecord, open_record
from moejob_trainer.launcher.stop import StopRequest
from moejob_trainer.launcher.temporary_files import launcher_folder
from moejob_trainer.launcher.termination_message import write_termination

log = LauncherLog()


def launch_pod(environ: Mapping[str, str], options: Options, stop: StopRequest) -> int:
    """Run the ranks of the pod that the environment describes; the exit code of the contract."""
    start_logging()
    try:
        pod = read_environment(TrainerPod, environ)
        trouble = pinning_trouble(pod.spec, pinned_limit_bytes())
        if trouble is not None:
            log.warning(trouble)
        engines = PodEngines(engine_commands(pod, environ), options.logs)
        try:
            record = open_record(pod, environ)
            try:
                report = _run_agent(pod, options, stop, PodParts(engines, record))
            finally:
                record.close()
        finally:
            engines.stop()
    except BadEnvironment as error:
        termination = TerminationMessage(outcome=PodOutcome.BAD_CONFIGURATION, message=str(error)[:2048])
        report = ExitReport(ExitCode.BAD_CONFIGURATION, termination)
    except BaseException as error:
        write_termination(
            TerminationMessage(outcome=PodOutcome.RANK_FAILED, message=f"launcher: {error!r}"[:2048]), options.last_word
        )
        raise
    write_termination(report.termination, options.last_word)
    return report.exit_code


@dataclass(frozen=True, slots=True)
class PodParts:
    """The parts of a pod beside its ranks."""

    engines: PodEngines
    record: LauncherRecord


def _run_agent(pod: TrainerPod, options: Options, stop: StopRequest, parts: PodParts) -> ExitReport:
    if pod.spec.resources.accelerator is Accelerator.CPU:
        os.environ |= waiting_variables(os.environ)
    with launcher_folder() as folder:
        ranks = RankProcesses(folder, options, parts.engines)
        # Engines start during the imports for ranks, and read no weights before ranks send them.
        parts.engines.keep_running()
        # Imported objects stay, and a collection over them would delay replies to other pods.
        gc.freeze()
        agent = Agent(pod, options, stop, ranks, parts.record)
        server = ProgressServer(pod.listens_on, pod.progress_port, agent.read_progress)
        try:
            return agent.run()
        finally:
            server.close()
            ranks.close()
