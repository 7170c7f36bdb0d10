"""Folders of prepared data: a folder is complete if it has its report.

A folder can be built again from its source data, so damage is no lasting failure: the next start builds it again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter

from moejob_api.owned_folders import owned_folder
from moejob_trainer.errors import TransientFailure
from moejob_trainer.runtime.disk import Disk, publish_folder

# Written last: a folder without a report is a remnant.
REPORT = "report.json"


class DamagedData(TransientFailure):
    """A folder of prepared data whose content differs from what was written."""


def ensure_prepared_folder(folder: Path, write: Callable[[Path], None], open_folder: Callable[[Path], object]) -> Path:
    """Return a complete folder: the existing folder if it opens without DamagedData, else a new one by `write`."""
    if _is_complete(folder, open_folder):
        return folder
    with owned_folder(".building-", folder.parent) as building:
        write(building)
        building.chmod(0o755)
        # Each document is compared with its checksum whenever it is read.
        publish_folder(Disk(), building, folder, needs_reading=lambda _: False)
    return folder


def write_report(folder: Path, report: object) -> None:
    """Write the report, which completes a folder."""
    Disk().write(folder / REPORT, TypeAdapter(type(report)).dump_json(report, indent=1))


def mark_damaged(folder: Path) -> DamagedData:
    """Remove the report of a folder that differs from what was written, and return the error to raise."""
    with suppress(OSError):
        (folder / REPORT).unlink(missing_ok=True)
    return DamagedData(f"{folder} was damaged since it was written; the next start builds it again")


def _is_complete(folder: Path, open_folder: Callable[[Path], object]) -> bool:
    if not (folder / REPORT).is_file():
        return False
    try:
        open_folder(folder)
    except DamagedData as error:
        sys.stderr.write(f"prepared data is built again: {error}\n")
        return False
    return True
