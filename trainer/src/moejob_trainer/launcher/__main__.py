"""`python -m moejob_trainer.launcher`: process 1 of a trainer pod. It reads the contract's environment."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from moejob_trainer.launcher.options import Options
from moejob_trainer.launcher.stop import StopRequest


def parse_options(arguments: list[str]) -> Options:
    """The options that `moejob run` and benchmarks set; a pod sets none."""
    parser = argparse.ArgumentParser(prog="moejob_trainer.launcher", description=__doc__)
    standard = Options()
    parser.add_argument("--last-word", type=Path, default=standard.last_word, help="file for the last word, as JSON")
    parser.add_argument("--logs", type=Path, default=standard.logs, help="folder for a log file of each rank")
    parser.add_argument(
        "--preload", default=",".join(standard.preload), help="modules imported before ranks start; none: they do it"
    )
    parsed = parser.parse_args(arguments)
    preload = tuple(name for name in parsed.preload.split(",") if name)
    return Options(preload=preload, last_word=parsed.last_word, logs=parsed.logs)


def main() -> int:
    """Run the pod."""
    stop = StopRequest()
    stop.listen_for_signals()
    # Process 1 loses a signal that it has no handler for, and imports take half a second.
    from moejob_trainer.launcher.launch import launch_pod  # noqa: PLC0415

    return launch_pod(os.environ, parse_options(sys.argv[1:]), stop)


if __name__ == "__main__":
    sys.exit(main())
