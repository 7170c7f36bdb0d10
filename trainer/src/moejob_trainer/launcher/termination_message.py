"""The last word of a pod: JSON where Kubernetes looks for it, never longer than Kubernetes keeps."""

from __future__ import annotations

from pathlib import Path

from moejob_api.contract import TERMINATION_BYTES, LastWord
from moejob_trainer.launcher.log import LauncherLog

log = LauncherLog()


def write(word: LastWord, path: Path) -> None:
    """Write it. The file is a mount: it can be written to, not replaced."""
    log.info("last word", outcome=word.outcome.value, message=word.message, rank=word.rank, exit_code=word.exit_code)
    try:
        path.write_bytes(truncated(word))
    except OSError as error:
        log.warning("the last word could not be written", path=str(path), error=str(error))


def truncated(word: LastWord) -> bytes:
    """The word as JSON, its message cut from the end until it fits."""
    while len(text := word.model_dump_json(by_alias=True, exclude_none=True).encode()) > TERMINATION_BYTES:
        too_many = len(text) - TERMINATION_BYTES
        # A character takes up to six bytes, as an escape: cutting a sixth of what is too much never cuts too far.
        word = word.model_copy(update={"message": word.message[: -max(1, too_many // 6)]})
    return text
