"""Step folders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_trainer.checkpoints.names import StepFolder, parse_step_folder
from moejob_trainer.runtime.fencing import FenceToken

NUMBERS = st.integers(min_value=0, max_value=10**9)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_a_name_says_what_it_was_made_of(step: int, attempt: int, restart: int) -> None:
    folder = StepFolder(step, FenceToken(attempt, restart))
    assert parse_step_folder(folder.name) == folder


@pytest.mark.parametrize(
    "name",
    ["step-10", "step-10.0", "step-10.0.0.tmp", "step-010.0.0", "step--1.0.0", "Step-1.0.0", "step-1.0.0\n", "10.0.0"],
)
def test_nothing_else_is_a_step_folder(name: str) -> None:
    assert parse_step_folder(name) is None


def test_a_later_step_is_newer_and_then_a_later_start() -> None:
    names = ["step-9.5.0", "step-10.0.0", "step-10.0.2", "step-10.1.0", "step-100.0.0"]
    folders = [folder for name in reversed(names) if (folder := parse_step_folder(name)) is not None]
    assert [folder.name for folder in sorted(folders)] == names
