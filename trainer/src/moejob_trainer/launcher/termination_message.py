"""The termination message of a pod: JSON where Kubernetes looks for it, never longer than Kubernetes keeps."""

from __future__ import annotations

from pathlib import Path

from moejob_api.contract.pods import TERMINATION_BYTES, TerminationMessage
from moejob_trainer.launcher.log import LauncherLog

log = LauncherLog()

# Bytes left to the message beside commits: no explanation of a failure needs more.
_LEAST_MESSAGE = 1024


def write_termination(termination: TerminationMessage, path: Path) -> None:
    """Write the message. The file is a mount: it can be written to, not replaced."""
    log.info(
        "last word",
        outcome=termination.outcome.value,
        message=termination.message,
        rank=termination.rank,
        exit_code=termination.exit_code,
    )
    try:
        path.write_bytes(fit_termination(termination))
    except OSError as error:
        log.warning("the last word could not be written", path=str(path), error=str(error))


def fit_termination(termination: TerminationMessage) -> bytes:
    """Return the message as JSON, with its text cut from the end until it fits.

    It has the commits of the hub only when all of them fit beside a long text: a part would look like all. The operator
    mostly knows them from the run, and hub.json keeps them in any case.
    """
    if termination.run is not None and termination.run.hub_commits and not _has_room_for_commits(termination):
        termination = termination.model_copy(update={"run": termination.run.model_copy(update={"hub_commits": None})})
    while len(text := _as_json(termination)) > TERMINATION_BYTES:
        excess_bytes = len(text) - TERMINATION_BYTES
        # A character takes up to six bytes, as an escape: cutting a sixth of what is too much never cuts too far.
        termination = termination.model_copy(update={"message": termination.message[: -max(1, excess_bytes // 6)]})
    return text


def _has_room_for_commits(termination: TerminationMessage) -> bool:
    return (
        len(_as_json(termination.model_copy(update={"message": termination.message[:_LEAST_MESSAGE]})))
        <= TERMINATION_BYTES
    )


def _as_json(termination: TerminationMessage) -> bytes:
    return termination.model_dump_json(by_alias=True, exclude_none=True).encode()
