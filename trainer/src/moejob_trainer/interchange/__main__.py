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
from moejob_trainer.interchange.conversion import export_megatron, import_megatron


def main(arguments: list[str] | None = None) -> int:
    """Convert; print one line, or what is wrong."""
    # What Megatron says about fusions and kernels concerns no conversion.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    asked = _parser().parse_args(arguments)
    try:
        done = _exported(asked) if asked.direction == "export" else _imported(asked)
    except InvalidSpec as error:
        print(*(problem.message for problem in error.problems), sep="\n", file=sys.stderr)  # noqa: T201
        return ExitCode.BAD_CONFIGURATION
    except OSError as error:
        print(f"{asked.out}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(done)  # noqa: T201
    return ExitCode.DONE


def _imported(asked: argparse.Namespace) -> str:
    report = import_megatron(asked.source, asked.config, asked.out)
    return f"wrote {asked.out}: {len(report.checksums)} tensors, {report.bytes:,} bytes, each read back and compared"


def _exported(asked: argparse.Namespace) -> str:
    count = export_megatron(asked.source, asked.out)
    return f"wrote {asked.out}: {count} tensors of Megatron's, each read back and compared"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moejob_trainer.interchange")
    parser.add_argument("direction", choices=("import", "export"))
    parser.add_argument("source", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
