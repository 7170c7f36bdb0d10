"""The folder of a launcher's temporary files: heartbeats, and the sockets of multiprocessing.

A process that is killed removes nothing, nor does its fork server, so all of it lies in one folder with an owner.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process
from pathlib import Path

from moejob_api.owned_folders import owned_folder

# The name of a socket has 107 characters at most, and multiprocessing adds 18 to the folder's.
_LONGEST_NAME = 85


@contextmanager
def launcher_folder() -> Iterator[Path]:
    """A folder for the temporary files of this launcher; removes the folders of killed launchers at once.

    TMPDIR stays as it is: kernels that were compiled are kept there, and serve the next start too.
    """
    # multiprocessing looks for its folder here, and passes it on to all that it starts.
    settings = current_process()._config  # type: ignore[attr-defined] # noqa: SLF001
    before = settings.get("tempdir")
    with owned_folder("moejob-", Path(tempfile.gettempdir())) as folder:
        if len(os.fsencode(folder)) <= _LONGEST_NAME:
            settings["tempdir"] = str(folder)
        try:
            yield folder
        finally:
            settings["tempdir"] = before
