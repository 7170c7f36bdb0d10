"""The last word of a pod: JSON where Kubernetes looks for it, never longer than Kubernetes keeps."""

from __future__ import annotations

from pathlib import Path

from moejob_api.contract.pods import TERMINATION_BYTES, LastWord, RunProgress
from moejob_trainer.launcher.log import LauncherLog

log = LauncherLog()

# Of a message that is cut to make room for commits: what is wrong with a job is said in less.
_LEAST_MESSAGE = 1024


def write(word: LastWord, path: Path) -> None:
    """Write it. The file is a mount: it can be written to, not replaced."""
    log.info("last word", outcome=word.outcome.value, message=word.message, rank=word.rank, exit_code=word.exit_code)
    try:
        path.write_bytes(truncated(word))
    except OSError as error:
        log.warning("the last word could not be written", path=str(path), error=str(error))


def truncated(word: LastWord) -> bytes:
    """The word as JSON, its message cut from the end until it fits.

    Commits of the hub come along when there is room for all of them beside a long message: some would be taken for
    all. The operator has mostly heard of them while the run lasted, and hub.json keeps them in any case.
    """
    if word.run is not None and word.run.hub_commits and not _has_room_for_commits(word):
        word = word.model_copy(update={"run": _without_commits(word.run)})
    while len(text := _as_json(word)) > TERMINATION_BYTES:
        too_many = len(text) - TERMINATION_BYTES
        # A character takes up to six bytes, as an escape: cutting a sixth of what is too much never cuts too far.
        word = word.model_copy(update={"message": word.message[: -max(1, too_many // 6)]})
    return text


def _has_room_for_commits(word: LastWord) -> bool:
    return len(_as_json(word.model_copy(update={"message": word.message[:_LEAST_MESSAGE]}))) <= TERMINATION_BYTES


def _without_commits(run: RunProgress) -> RunProgress:
    return run.model_copy(update={"hub_commits": None})


def _as_json(word: LastWord) -> bytes:
    return word.model_dump_json(by_alias=True, exclude_none=True).encode()
