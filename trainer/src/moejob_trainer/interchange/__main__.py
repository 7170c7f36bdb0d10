"""`python -m moejob_trainer.interchange`, which `moejob import`, `moejob export` and a rank start.

import CHECKPOINT --config FOLDER --out FOLDER
export FOLDER --out FOLDER [--replace]
check FOLDER

--parent PID ends the program with the process that started it; --shares-to FD shows how much is done.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

from moejob_api.contract.pods import ExitCode
from moejob_api.problems import InvalidSpec
from moejob_trainer.interchange.conversion import (
    export_megatron_checkpoint,
    import_megatron_checkpoint,
    require_convertible_model,
)
from moejob_trainer.rewards.confinement import end_with_parent
from moejob_trainer.runtime.share_display import open_share_display


def main(arguments: list[str] | None = None) -> int:
    """Convert; print one line, or what is wrong."""
    # What Megatron says about fusions and kernels concerns no conversion.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    options = _build_parser().parse_args(arguments)
    if options.parent is not None and not _follows_parent(options.parent):
        return 1
    try:
        summary = _ACTIONS[options.action](options)
    except InvalidSpec as error:
        print(*(problem.message for problem in error.problems), sep="\n", file=sys.stderr)  # noqa: T201
        return ExitCode.BAD_CONFIGURATION
    except OSError as error:
        print(f"{options.out}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(summary)  # noqa: T201
    return ExitCode.DONE


def _follows_parent(parent: int) -> bool:
    end_with_parent()
    # The kernel reports no death from before the request.
    return os.getppid() == parent


def _run_check(options: argparse.Namespace) -> str:
    require_convertible_model(options.source)
    return f"{options.source} can be converted"


def _run_import(options: argparse.Namespace) -> str:
    report_share = open_share_display("importing", options.shares_to)
    report = import_megatron_checkpoint(options.source, options.config, options.out, report_share)
    return f"wrote {options.out}: {len(report.checksums)} tensors, {report.bytes:,} bytes, each read back and compared"


def _run_export(options: argparse.Namespace) -> str:
    count = export_megatron_checkpoint(options.source, options.out, replaces_older=options.replace)
    return f"wrote {options.out}: {count} tensors of Megatron's, each read back and compared"


_ACTIONS = {"check": _run_check, "export": _run_export, "import": _run_import}


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moejob_trainer.interchange")
    parser.add_argument("action", choices=_ACTIONS)
    parser.add_argument("source", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--parent", type=int)
    parser.add_argument("--shares-to", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
