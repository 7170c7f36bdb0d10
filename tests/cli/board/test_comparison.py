"""Runs are compared by the fields of their jobs, and by their curves over the steps that all of them have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from builders import spec
from cli.board.made_runs import HOSTILE
from moejob_cli.board.comparison import CurveDifference, compare_curves, compare_fields


def write_run(folder: Path, name: str, losses: dict[int, float], **sections: object) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"job": name, "uid": "1234"}))
    (folder / "spec.json").write_text(spec(**sections).model_dump_json(by_alias=True, exclude_none=True))
    lines = [{"step": step, "loss": loss, "time": 1.0, "attempt": 1} for step, loss in losses.items()]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moejob_cli", "compare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        pytest.param([{1: 2.0, 2: 1.0}] * 2, CurveDifference("loss", 2, (1.0, 1.0), None, None, None), id="equal"),
        pytest.param(
            [{1: 1.0, 2: 2.0, 3: 4.0}, {1: 1.0, 2: 3.5, 3: 5.0}],
            CurveDifference("loss", 3, (4.0, 5.0), 2, 2, 1.5),
            id="apart most before the end",
        ),
        pytest.param(
            [{1: 1.0, 2: 2.0}, {2: 2.0, 3: 9.0}], CurveDifference("loss", 2, (2.0, 2.0), None, None, None), id="overlap"
        ),
        pytest.param(
            [{1: 1.0}, {2: 3.0}, {}], CurveDifference("loss", None, (1.0, 3.0, None), None, None, None), id="no overlap"
        ),
        pytest.param(
            [{1: 1.0}, {1: 4.0}, {1: 2.0}], CurveDifference("loss", 1, (1.0, 4.0, 2.0), 1, 1, 3.0), id="three runs"
        ),
    ],
)
def test_curves_are_compared_over_their_common_steps(curves: list[dict[int, float]], expected: CurveDifference) -> None:
    assert compare_curves("loss", curves) == expected


def test_a_run_that_has_not_written_its_job_yet_differs_in_no_field(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", "first", {1: 2.0})
    second = write_run(tmp_path / "second", "second", {1: 2.0}, training={"maxSteps": 7})
    starting = write_run(tmp_path / "starting", "starting", {})
    (starting / "spec.json").unlink()
    lines = compare(first, second, starting).stdout.splitlines()
    assert lines[:2] == ["not written yet: the job of starting", "1 field differs"]
    assert lines[3].split()[2:] == ["7", "–"]


def test_fields_are_told_in_the_words_of_yaml(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", "first", {1: 2.0})
    second = write_run(tmp_path / "second", "second", {1: 2.0}, checkpoint={"exportHuggingFace": False})
    lines = compare(first, second).stdout.splitlines()
    assert lines[2].split() == ["checkpoint.exportHuggingFace", "true", "false"]


def test_a_field_that_one_job_lacks_differs() -> None:
    assert [(each.path, each.values) for each in compare_fields([{"a": "1", "b": "2"}, {"a": "1", "c": "3"}])] == [
        ("b", ("2", None)),
        ("c", (None, "3")),
    ]


def test_a_program_gets_every_number_and_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", "slow", {1: 3.0, 2: 2.5, 3: 2.0})
    two = write_run(tmp_path / "two", "fast", {1: 3.0, 2: 9.0, 3: 9.0, 4: 9.0}, training={"maxSteps": 90})
    with (two / "steps.jsonl").open("a") as log:
        # A restart did step 2 again and got no further: what was after it does not count.
        log.write(json.dumps({"step": 2, "loss": 2.0}) + "\n")
    answer = compare(one, two, "-o", "json")
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert document == {
        "runs": ["slow", "fast"],
        "lastSteps": [3, 2],
        "commonSteps": 2,
        "fields": {"training.maxSteps": document["fields"]["training.maxSteps"]},
        "curves": {
            "loss": {"step": 2, "values": [2.5, 2.0], "firstDifferenceStep": 2, "farthestStep": 2, "farthest": 0.5}
        },
    }
    assert document["fields"]["training.maxSteps"][1] == "90"


def test_a_person_sees_fields_and_curves_and_runs_of_one_name_by_their_folders(tmp_path: Path) -> None:
    write_run(tmp_path / "one", "tiny", {1: 3.0, 2: 2.5})
    write_run(tmp_path / "two", "tiny", {1: 3.0, 2: 2.0}, training={"maxSteps": 90})
    answer = compare(tmp_path)
    assert answer.returncode == 0, answer.stderr
    lines = [" ".join(line.split()) for line in answer.stdout.splitlines()]
    assert lines[0] == "1 field differs"
    assert f"field {tmp_path}/one {tmp_path}/two" in lines
    assert any(line.startswith("training.maxSteps ") and line.endswith(" 90") for line in lines)
    assert "loss 2 2.5 2 at 2 0.5 at 2" in lines


def test_a_hostile_run_is_text(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", f"[red]{HOSTILE}", {1: 3.0})
    two = write_run(tmp_path / "two", "fast", {1: 3.0})
    (two / "spec.json").write_text(json.dumps({"note": f"[link=http://x]{HOSTILE}[/link][/]"}))
    answer = compare(one, two)
    assert answer.returncode == 0, answer.stderr
    assert "[red]" in answer.stdout
    assert "[link=http://x]" in answer.stdout
    assert "\x1b" not in answer.stdout


@pytest.mark.parametrize("given", [1, 0])
def test_fewer_than_two_runs_are_refused(tmp_path: Path, given: int) -> None:
    write_run(tmp_path / "one", "slow", {1: 3.0})
    answer = compare(tmp_path / "one" if given else tmp_path / "none")
    assert answer.returncode == 2
    assert ("name two runs or more" if given else "holds no run") in " ".join(answer.stderr.split())
