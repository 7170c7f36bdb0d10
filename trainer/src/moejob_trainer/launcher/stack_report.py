"""`python -m moejob_trainer.launcher.stack_report`: prints the Python stacks of the ranks of this pod, a rank a line.

`moejob stacks` runs it in each pod of a job, and on this machine for a run of `moejob run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from moejob_api.contract.pods import Environment
from moejob_api.contract.stacks import stacks_line
from moejob_trainer.launcher.stacks import find_ranks, read_stacks

_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Print the stacks of all ranks of a run folder."""
    parser = argparse.ArgumentParser(prog="moejob_trainer.launcher.stack_report", description=__doc__)
    parser.add_argument("--run-folder", type=Path, default=Path(os.environ.get(Environment.RUN_FOLDER, "")))
    folder = parser.parse_args(arguments).run_folder
    for stacks in read_stacks(find_ranks(Environment.RUN_FOLDER, folder), _SECONDS):
        sys.stdout.write(stacks_line(stacks) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
