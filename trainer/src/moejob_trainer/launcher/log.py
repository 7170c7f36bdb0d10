"""The launcher's own lines in the pod's log: one line an event, with its fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping

_FIELDS = "fields"


class LauncherLog:
    """A logger whose calls are an event and its fields."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("moejob_trainer.launcher")

    def info(self, event: str, **fields: object) -> None:
        """Something happened that belongs to the run."""
        self._logger.info(event, extra={_FIELDS: fields})

    def warning(self, event: str, **fields: object) -> None:
        """Something went wrong."""
        self._logger.warning(event, extra={_FIELDS: fields})


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        return " ".join(["[launcher]", record.getMessage(), *(f"{name}={value!r}" for name, value in fields.items())])


def start_logging() -> None:
    """Write to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter())
    logger = logging.getLogger("moejob_trainer.launcher")
    # Not through the root logger: libraries configure it, and each line would be written twice.
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
