"""Files that a stranger may have written: only regular files are opened, and JSON is read within bounds."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

from moejob_trainer.conversion.checkpoint import unusable_checkpoint
from moejob_trainer.data.links import require_contained_links
from moejob_trainer.errors import BadData

_MOST_JSON_BYTES = 64 * 1024**2


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or the one that a link leads to; OSError for a pipe or anything else."""
    # Links are resolved already, so a link here has replaced the file since. Opening a pipe would wait for a writer.
    descriptor = os.open(path.resolve(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def require_links_inside(folder: Path) -> None:
    """Refuse a folder with a link out of it, or one that leads nowhere."""
    try:
        require_contained_links(folder)
    except BadData as error:
        raise unusable_checkpoint(str(error)) from error


def read_json_object(path: Path) -> dict[str, object]:
    """Return the object of a JSON file; InvalidSpec where it holds none."""
    try:
        with open_regular(path) as json_file:
            content = json.loads(json_file.read(_MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise unusable_checkpoint(f"{path} cannot be read: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise unusable_checkpoint(f"{path} holds no JSON object; copy it again")
    return content
