"""`moejob board`, `report` and `compare`: which folders are runs, and where page and comparison go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moejob_api.contract.pods import RunFile
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_cli.board.comparison import SHOWN_METRICS, compare_runs, comparison_document, comparison_report
from moejob_cli.board.one_file import build_report
from moejob_cli.board.run_files import RunFiles
from moejob_cli.board.server import BoardServer
from moejob_cli.option_types import OutputFormat
from moejob_cli.printing import print_document, print_report

# A run has written at least one of them.
_SIGNS = (RunFile.OWNER, RunFile.STEPS, RunFile.RECORD)
_MOST_RUNS = 200


def open_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Return the runs in these folders: each is a run, or holds runs. InvalidSpec when there is none."""
    runs = [run for folder in folders or [Path("runs")] for run in _runs_of_folder(folder)]
    if not runs:
        names = ", ".join(map(str, folders)) or "runs"
        message = f"{names} holds no run; name a run folder, or a folder of run folders"
        raise InvalidSpec((Problem(Rule.UNREADABLE, "", message),))
    return [RunFiles(folder, cache_folder()) for folder in runs[:_MOST_RUNS]]


def serve_board(folders: Sequence[Path], port: int) -> BoardServer:
    """Return the server of these runs, which listens already."""
    return BoardServer(open_runs(folders), port)


def write_report(folders: Sequence[Path], target: Path) -> int:
    """Write the report of these runs as one file; its bytes."""
    content = build_report(open_runs(folders)).encode()
    with target.open("wb") as file:
        file.write(content)
    return len(content)


def show_comparison(runs: Sequence[RunFiles], output: OutputFormat) -> None:
    """Print how runs differ: the numbers that people look at first, or all of them for a program."""
    if output is OutputFormat.TABLE:
        print_report(comparison_report(compare_runs(runs, SHOWN_METRICS)))
    else:
        print_document(comparison_document(compare_runs(runs)), output)


def cache_folder() -> Path:
    """The folder of columns that were read before."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "moejob" / "board"


def _runs_of_folder(folder: Path) -> list[Path]:
    if _is_run(folder):
        return [folder]
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path))
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return any((folder / sign).exists() for sign in _SIGNS)
