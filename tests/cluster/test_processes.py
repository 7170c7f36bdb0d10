"""Processes that fail to start say why, and those that are stopped leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.processes import EndedError, Process
from cluster.waiting import TooLateError, until


def test_a_process_that_ends_shows_the_end_of_its_log(tmp_path: Path) -> None:
    process = Process("broken", ["sh", "-c", "seq 100; echo no such flag >&2; exit 3"], tmp_path)
    process.start()
    with pytest.raises(EndedError, match=r"(?s)broken ended with 3; .*100\nno such flag"):
        process.wait_until(lambda: False)
    with pytest.raises(EndedError, match="broken ended with 3"):
        process.expect_running()
    process.stop()


def test_a_process_that_is_never_ready_shows_the_end_of_its_log(tmp_path: Path) -> None:
    process = Process("slow", ["sh", "-c", "echo waiting for godot; exec sleep 60"], tmp_path)
    process.start()
    until(lambda: "godot" in process.log.read_text(), waiting_for="its log")
    with pytest.raises(TooLateError, match=r"(?s)not within 0 s: slow ready; .*waiting for godot"):
        process.wait_until(lambda: False, seconds=0)
    process.stop()


def test_stopping_ends_what_the_process_has_started(tmp_path: Path) -> None:
    process = Process("parent", ["sh", "-c", "sleep 60 & echo $!; wait"], tmp_path)
    process.start()
    child = until(lambda: process.log.read_text().strip(), waiting_for="the child")
    process.stop()
    until(lambda: not Path(f"/proc/{child}").exists(), waiting_for="the end of the child")
    assert process.pid is None
