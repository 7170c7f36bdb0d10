"""Cases of one run on GPUs: what each is made of, and those that are left when its processes are started again."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks.trainer.gpu_step import case_name, parsed_cases, parser
from benchmarks.trainer.in_turn import CaseLog


def options(text: str = "") -> Namespace:
    return parser().parse_args(text.split())


@pytest.mark.parametrize(
    ("around", "texts", "expected"),
    [
        pytest.param("--layers 3", [], ["--layers 3"], id="without cases the options are one"),
        pytest.param(
            "--layers 3 --gradients bfloat16",
            ["--data 2", "--layers 8"],
            ["--layers 3 --gradients bfloat16 --data 2", "--layers 8 --gradients bfloat16"],
            id="a case takes the rest from the options around it",
        ),
        pytest.param(
            "",
            ["# layouts", "", "--modules Norms MLP --recompute Selective  # the cheapest"],
            ["--recompute Selective --modules Norms MLP"],
            id="lines of a file may be empty or say why",
        ),
    ],
)
def test_cases_are_the_options_of_one_run_each(around: str, texts: list[str], expected: list[str]) -> None:
    assert parsed_cases(texts, options(around)) == [options(text) for text in expected]


def test_a_wrong_case_is_refused_before_any_is_measured() -> None:
    with pytest.raises(SystemExit):
        parsed_cases(["--layers 3", "--layer 3"], options())


def test_a_case_is_named_by_what_is_not_as_usual() -> None:
    assert case_name(options("--layers 3 --data 2")) == "layers=3 data=2"


def test_cases_that_were_begun_are_not_tried_again(tmp_path: Path) -> None:
    log = CaseLog(tmp_path / "cases")
    assert (log.begun_cases(), log.lines()) == (0, [])
    log.begin(0)
    log.end({"loss": 1.5})
    log.begin(1)
    assert (log.begun_cases(), log.lines()) == (2, [{"loss": 1.5}])
