"""Files that vLLM makes for one run of an engine and leaves behind: sockets, meeting places, and shared memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moejob_api.owned_folders import owned_folder, remove_folder

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def own_temporary_files() -> Iterator[None]:
    """Let temporary files lie in a folder of their own, and remove them at the end."""
    # What is compiled serves the next engine too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    # A short name: that of a socket has 107 characters at most.
    with owned_folder("engine-", Path(tempfile.gettempdir()), _remove_files) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        yield


def _remove_files(folder: Path) -> None:
    _remove_shared_memory(folder)
    remove_folder(folder)


def _remove_shared_memory(folder: Path) -> None:
    """Remove the blocks in which workers on a CPU exchange sums, which bear the name of the place where they met."""
    for meeting in folder.glob("vllm_dist_*"):
        for block in _SHARED_MEMORY.glob(f"{meeting.name}-*"):
            block.unlink(missing_ok=True)
