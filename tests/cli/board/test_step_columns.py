"""Columns hold what the lines of steps.jsonl say, whenever they are read."""

from __future__ import annotations

import json
import os
from math import isnan
from pathlib import Path

import pytest

from moejob_cli.board import step_columns
from moejob_cli.board.step_columns import MOST_COLUMNS, StepColumns


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


def columns_of(steps: Path) -> StepColumns:
    columns = StepColumns(steps, steps.parent / "cache")
    columns.refresh()
    return columns


def line(step: int, **more: object) -> str:
    return json.dumps({"step": step, "loss": step / 3, **more}) + "\n"


def test_a_number_that_a_line_lacks_is_none(steps: Path) -> None:
    steps.write_text(line(1) + line(2, evalLoss=0.5) + line(3, loss=None, applied=True, name="text"))
    columns = columns_of(steps)
    assert [*columns.read_column("loss")][:2] == [1 / 3, 2 / 3]
    assert isnan(columns.read_column("loss")[2])
    assert [isnan(value) for value in columns.read_column("evalLoss")] == [True, False, True]
    assert columns.read_column("applied")[2] == 1.0
    assert all(map(isnan, columns.read_column("no such number")))


def test_lines_that_are_added_are_read_and_a_half_line_waits(steps: Path) -> None:
    steps.write_text(line(1) + '{"step": 2, "lo')
    columns = columns_of(steps)
    assert columns.rows == 1
    with steps.open("a") as file:
        file.write('ss": 7}\n' + line(3))
    columns.refresh()
    assert [*columns.read_column("step")] == [1.0, 2.0, 3.0]
    assert columns.read_column("loss")[1] == 7.0


def test_a_damaged_line_is_left_out_and_the_others_are_read(steps: Path) -> None:
    steps.write_text(line(1) + "\x00\x00 power was lost\n[1]\n" + line(2, loss=10**400))
    columns = columns_of(steps)
    assert [*columns.read_column("step")] == [1.0, 2.0]
    assert isnan(columns.read_column("loss")[1])


def test_a_second_reader_finds_the_columns_in_the_cache(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 30_000
    steps.write_text("".join(line(step) for step in range(count)))
    assert columns_of(steps).rows == count
    monkeypatch.setattr(step_columns, "parse_lines", lambda lines: pytest.fail(f"{len(lines)} lines are read again"))
    again = columns_of(steps)
    assert [*again.read_column("loss")] == [step / 3 for step in range(count)]


def test_columns_of_another_run_in_the_same_folder_are_not_taken(steps: Path) -> None:
    count = 30_000
    steps.write_text("".join(line(step) for step in range(count)))
    columns_of(steps)
    steps.write_text("".join(line(step, loss=-1.0) for step in range(count)))
    assert set(columns_of(steps).read_column("loss")) == {-1.0}


def test_a_file_that_became_shorter_is_read_again(steps: Path) -> None:
    steps.write_text(line(1) + line(2))
    columns = columns_of(steps)
    steps.write_text(line(5))
    columns.refresh()
    assert [*columns.read_column("step")] == [5.0]


def test_a_damaged_cache_is_read_again(steps: Path) -> None:
    count = 30_000
    steps.write_text("".join(line(step) for step in range(count)))
    columns_of(steps)
    (cached,) = (steps.parent / "cache").glob("*.columns")
    cached.write_bytes(b'{"version": 1}\nrubbish')
    assert columns_of(steps).rows == count
    os.truncate(cached, cached.stat().st_size // 2)
    assert len(columns_of(steps).read_column("loss")) == count


def test_names_without_end_are_bounded(steps: Path) -> None:
    steps.write_text(json.dumps({"step": 1} | {f"n{number}": number for number in range(2_000)}) + "\n")
    assert len(columns_of(steps).names) == MOST_COLUMNS
