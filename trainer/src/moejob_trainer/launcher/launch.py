"""A launcher from its environment to its exit code: its parts are built here, and it never goes without a last word."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from moejob_api.contract import ExitCode, LastWord, Outcome
from moejob_trainer.launcher.ending import Departure
from moejob_trainer.launcher.last_words import leave
from moejob_trainer.launcher.options import Options
from moejob_trainer.launcher.pod import BadEnvironment, Pod, pod_of
from moejob_trainer.launcher.ranks import Ranks
from moejob_trainer.launcher.says import start_logging
from moejob_trainer.launcher.serving import Serving
from moejob_trainer.launcher.stop import Stop


def launch(environ: Mapping[str, str], options: Options, stop: Stop) -> int:
    """Run the ranks of the pod that the environment describes; the exit code of the contract."""
    start_logging()
    try:
        departure = _lived(pod_of(environ), options, stop)
    except BadEnvironment as error:
        word = LastWord(outcome=Outcome.BAD_CONFIGURATION, message=str(error)[:2048])
        departure = Departure(ExitCode.BAD_CONFIGURATION, word)
    except BaseException as error:
        leave(LastWord(outcome=Outcome.RANK_FAILED, message=f"launcher: {error!r}"[:2048]), options.last_word)
        raise
    leave(departure.word, options.last_word)
    return departure.exit_code


def _lived(pod: Pod, options: Options, stop: Stop) -> Departure:
    with tempfile.TemporaryDirectory(prefix="moejob-") as folder:
        ranks = Ranks(Path(folder), options.preload, options.logs)
        # Imports torch, for seconds, and so does the fork server: the one need not wait for the other.
        from moejob_trainer.launcher.agent import Agent  # noqa: PLC0415

        agent = Agent(pod, options, stop, ranks)
        serving = Serving(pod.listens_on, pod.progress_port, agent.progress)
        try:
            return agent.run()
        finally:
            serving.close()
