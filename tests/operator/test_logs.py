"""Log lines: one JSON object each, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from moejob_operator.cluster import JobKey
from moejob_operator.logs import Log, LogFormat, configure_logs

log = Log("moejob_operator.test")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    found = logging.getLogger()
    before = (found.handlers, found.level)
    yield found
    found.handlers, found.level = before[0], before[1]


def lines(form: LogFormat = LogFormat.JSON, level: str = "INFO") -> io.StringIO:
    stream = io.StringIO()
    configure_logs(level, form, stream)
    return stream


@pytest.mark.usefixtures("root")
def test_a_line_is_an_event_with_fields() -> None:
    stream = lines()
    log.info("gang restarted", job="a", attempt=2, key=JobKey("default", "a"))
    said = json.loads(stream.getvalue())
    assert said.pop("time").endswith("+00:00")
    assert said == {
        "level": "info", "logger": "moejob_operator.test", "event": "gang restarted", "job": "a", "attempt": 2,
        "key": "default/a",
    }  # fmt: skip


@pytest.mark.usefixtures("root")
def test_an_error_carries_its_traceback_in_the_same_line() -> None:
    stream = lines()
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 // 0
    log.error("bug", raised=caught.value)
    [line] = stream.getvalue().splitlines()
    said = json.loads(line)["traceback"]
    assert said.startswith("Traceback")
    assert "ZeroDivisionError" in said


@pytest.mark.usefixtures("root")
def test_lines_of_libraries_look_the_same_and_their_chatter_is_left_out() -> None:
    stream = lines()
    logging.getLogger("aiohttp.access").info("GET /metrics")
    logging.getLogger("aiohttp").error("%s failed", "request")
    logging.getLogger("other").info("hello")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["request failed", "hello"]


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"logger": "another", "level": "x", "time": 1}, id="fields that are called as the event's own"),
        pytest.param({"text": "two\nlines", "quote": '"', "half": "\ud800"}, id="text that would break a line"),
        pytest.param({"number": float("nan"), "nothing": None, "bytes": b"\xff"}, id="what JSON has no word for"),
    ],
)
def test_no_field_breaks_a_line(fields: dict[str, Any]) -> None:
    stream = lines()
    log.info("gang restarted", **fields)
    [line] = stream.getvalue().splitlines()
    assert json.loads(line)["event"] == "gang restarted"
    assert json.loads(line)["level"] == "info"


@pytest.mark.usefixtures("root")
def test_a_person_reads_text() -> None:
    stream = lines(LogFormat.TEXT, "WARNING")
    log.info("not this")
    log.debug("nor this")
    log.warning("lost a pod", pod="a-0", node="n1")
    assert stream.getvalue().rstrip("\n")[9:] == "warning lost a pod pod=a-0 node=n1"


@pytest.mark.usefixtures("root")
def test_a_denied_job_is_no_error_of_the_operator() -> None:
    stream = io.StringIO()
    configure_logs("INFO", LogFormat.JSON, stream)
    logging.getLogger("kopf.objects").error("Webhook 'validate' failed permanently: spec: no")
    logging.getLogger("kopf.objects").error("Handler 'job_event' failed with an exception")
    levels = [json.loads(line)["level"] for line in stream.getvalue().splitlines()]
    assert levels == ["info", "error"]
