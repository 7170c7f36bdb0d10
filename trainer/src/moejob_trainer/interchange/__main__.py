"""`python -m moejob_trainer.interchange`, which `moejob import` and `moejob export` start.

import CHECKPOINT --config FOLDER --out FOLDER
export FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

from moejob_api.contract.pods import ExitCode
from moejob_api.problems import InvalidSpec
from moejob_trainer.interchange.conversion import export_megatron_checkpoint, import_megatron_checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Convert; print one line, or what is wrong."""
    # What Megatron says about fusions and kernels concerns no conversion.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    options = _build_parser().parse_args(arguments)
    try:
        summary = _run_export(options) if options.direction == "export" else _run_import(options)
    except InvalidSpec as error:
        print(*(problem.message for problem in error.problems), sep="\n", file=sys.stderr)  # noqa: T201
        return ExitCode.BAD_CONFIGURATION
    except OSError as error:
        print(f"{options.out}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(summary)  # noqa: T201
    return ExitCode.DONE


def _run_import(options: argparse.Namespace) -> str:
    report = import_megatron_checkpoint(options.source, options.config, options.out)
    return f"wrote {options.out}: {len(report.checksums)} tensors, {report.bytes:,} bytes, each read back and compared"


def _run_export(options: argparse.Namespace) -> str:
    count = export_megatron_checkpoint(options.source, options.out)
    return f"wrote {options.out}: {count} tensors of Megatron's, each read back and compared"


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moejob_trainer.interchange")
    parser.add_argument("direction", choices=("import", "export"))
    parser.add_argument("source", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
