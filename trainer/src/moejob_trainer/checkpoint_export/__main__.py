"""`python -m moejob_trainer.checkpoint_export`, which `moejob export` starts.

RUN --out FOLDER [--step N|best] [--merge-adapters] [--dtype TYPE] [--base FOLDER] [--shares-to FD]
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from moejob_api.contract.pods import ExitCode
from moejob_api.problems import InvalidSpec
from moejob_trainer.checkpoint_export.run import BEST, Best, read_stored_run
from moejob_trainer.checkpoint_export.run_export import ExportOptions, export_run
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.runtime.share_display import open_share_display


def main(arguments: Sequence[str] | None = None) -> int:
    """Export; print one line, or what is wrong."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    options = _build_parser().parse_args(arguments)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    try:
        summary = export_run(
            read_stored_run(options.run, options.step),
            ExportOptions(
                options.out,
                options.merge_adapters,
                dtype,
                options.base,
                report_share=open_share_display("exporting", options.shares_to),
            ),
        )
    except (BadConfiguration, InvalidSpec) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return ExitCode.BAD_CONFIGURATION
    except OSError as error:
        print(describe_failure(error, options.run, options.out), file=sys.stderr)  # noqa: T201
        return 1
    print(summary)  # noqa: T201
    return ExitCode.DONE


def describe_failure(error: OSError, run: Path, out: Path) -> str:
    """Explain a failure of the machine: files of the run are gone, or the folder takes none."""
    # What reads safetensors names no file.
    is_read = error.filename is None or Path(error.filename).resolve().is_relative_to(run.resolve())
    if isinstance(error, FileNotFoundError) and is_read:
        return (
            f"{error}: a run that is training may have removed this checkpoint (checkpoint.keep); export again, or "
            "name a newer --step"
        )
    if is_read:
        return str(error)
    return f"{out} cannot be written: {error.strerror or error}; make room there, or name another folder with --out"


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moejob_trainer.checkpoint_export")
    parser.add_argument("--shares-to", type=int)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step", type=_parse_step)
    parser.add_argument("--merge-adapters", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--base", type=Path)
    return parser


def _parse_step(text: str) -> int | Best:
    return BEST if text == BEST else int(text)


if __name__ == "__main__":
    sys.exit(main())
