"""The folder of all temporary files of a launcher and its ranks: heartbeats, and what libraries make as they like.

A rank that is killed removes nothing, nor does its fork server, so that all of it lies in one folder with an owner.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moejob_api.owned_folders import owned_folder

# The name of a socket has 107 characters at most, and multiprocessing adds 33 to the folder's.
_LONGEST_NAME = 70


@contextmanager
def temporary_files() -> Iterator[Path]:
    """Let temporary files lie in a folder of their own; those of launchers that were killed go at once."""
    parent = tempfile.gettempdir()
    # What is compiled serves the next start too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{parent}/torchinductor_{os.getuid()}")
    with owned_folder("moejob-", Path(parent)) as folder:
        if len(os.fsencode(folder)) <= _LONGEST_NAME:
            os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        try:
            yield folder
        finally:
            os.environ["TMPDIR"] = tempfile.tempdir = parent
