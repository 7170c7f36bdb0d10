"""Log lines as events with fields. Owns their format; knows nothing of what is logged."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

# The name a record carries its fields under.
_FIELDS = "moejob_fields"
# Loggers with a line for each request or event at INFO; only their warnings are written.
_TALKATIVE = ("aiohttp", "asyncio", "kopf.objects", "kopf.activities")


class LogFormat(StrEnum):
    """JSON for machines, text for people."""

    JSON = "JSON"
    TEXT = "Text"


class Log:
    """Events with fields: log.info("gang restarted", job=name, attempt=2)."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Log a detail for developers."""
        self._write_event(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log an expected event."""
        self._write_event(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log an event that is tried again."""
        self._write_event(logging.WARNING, event, fields)

    def error(self, event: str, *, raised: BaseException | None = None, **fields: object) -> None:
        """Log an event that a person has to act on, with the traceback of the exception."""
        self._write_event(logging.ERROR, event, fields, raised)

    def _write_event(
        self, level: int, event: str, fields: Mapping[str, object], raised: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            exception = None if raised is None else (type(raised), raised, raised.__traceback__)
            self._logger.log(level, event, exc_info=exception, extra={_FIELDS: dict(fields)}, stacklevel=3)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON; a traceback is a field of it."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        # No field may replace the time, level, logger or name of an event.
        line |= {name: value for name, value in _event_fields(record).items() if name not in line}
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """One line for a terminal, and tracebacks below it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line, its traceback on further lines."""
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        fields = "".join(f" {name}={value}" for name, value in _event_fields(record).items())
        line = f"{time} {record.levelname.lower():7} {record.getMessage()}{fields}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


def configure_logs(level: str, form: LogFormat, stream: TextIO = sys.stdout) -> None:
    """Send every log line of the process, those of libraries too, to one stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    handler.addFilter(_relabel_denial)
    root.handlers = [handler]
    root.setLevel(level)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _relabel_denial(record: logging.LogRecord) -> bool:
    """Log a denial at INFO: kopf logs a handler that refuses a job as an error."""
    if record.name == "kopf.objects" and " failed permanently: " in str(record.msg):
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def _event_fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    return fields
