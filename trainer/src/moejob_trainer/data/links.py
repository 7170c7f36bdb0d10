"""Links in the folders of models and data: followed inside a folder, never out of it.

Such a folder may be shared, and its writer need not be the job's user: a tokenizer file that is a link to
/proc/self/environ would carry the secrets of the job into its export. A snapshot in a cache of the Hugging Face hub is
all links, into the blobs beside it, so for one of those the folder is its model's part of the cache.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from moejob_trainer.errors import BadData

_SNAPSHOTS = "snapshots"
_CACHED = ("models--", "datasets--")


def require_contained_links(folder: Path) -> None:
    """Raise BadData when a link leads out of the folder."""
    bounds = _link_bounds(folder)
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink():
                _resolve_inside(path, bounds)


def copy_file(source: Path, target: Path, folder: Path) -> None:
    """Copy a regular file of a folder, or raise BadData when it is something else or lies elsewhere."""
    real = _resolve_inside(source, _link_bounds(folder))
    # The check and this call may see different files, as others can write here: no link is followed any more.
    with os.fdopen(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as content:
        if not stat.S_ISREG(os.fstat(content.fileno()).st_mode):
            raise BadData(f"{source} is not a regular file; replace it, or remove it from the folder")
        with target.open("wb") as copy:
            shutil.copyfileobj(content, copy)


def _link_bounds(folder: Path) -> Path:
    _refuse_loop(folder)
    real = folder.resolve()
    is_snapshot = real.parent.name == _SNAPSHOTS and real.parent.parent.name.startswith(_CACHED)
    return real.parent.parent if is_snapshot else real


def _refuse_loop(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadData(f"{path} is a link that leads to itself; remove it, or replace it") from error


def _resolve_inside(path: Path, bounds: Path) -> Path:
    _refuse_loop(path)
    real = path.resolve()
    if not real.is_relative_to(bounds):
        raise BadData(
            f"{path} leads to {real} by a link, out of {bounds}; put the file itself there, or name the folder that it "
            "lies in"
        )
    return real
