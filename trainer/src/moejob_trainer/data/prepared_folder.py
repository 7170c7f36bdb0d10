"""Folders of prepared data: each is whole or not there, and says so by its report."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from moejob_trainer.errors import BadData

# Written last: what lies there without one is a remnant.
REPORT = "report.json"


def built(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return the folder, which `write` fills unless it is there; it gets its name when it is whole."""
    if (folder / REPORT).is_file():
        return folder
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        write(building)
        building.chmod(0o755)
        # The rename makes it count: a rank that is killed before leaves nothing that looks whole.
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def finish(folder: Path, report: object) -> None:
    """Write the report, which is what makes a folder whole: it comes last."""
    (folder / REPORT).write_bytes(TypeAdapter(type(report)).dump_json(report, indent=1))


def damaged(folder: Path) -> BadData:
    """Return what is raised where a folder holds something else than was written."""
    return BadData(f"{folder} was damaged since it was written; delete it, and it is built again")
