"""The word list that `make lint` holds docstrings, comments, pages and commit subjects to."""

from __future__ import annotations

from pathlib import Path

import pytest

from words import (
    Words,
    class_problems,
    file_problems,
    identifier_problems,
    page_problems,
    python_problems,
    subject_problems,
)

WORDS = Words({"goes on": "continues", "nobody": "no rank"}, ("What", "Whether"))


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        pytest.param('"""A run goes on."""\n', ["1: 'goes on': write continues"], id="a docstring"),
        pytest.param("x = 1\n# Nobody reads it.\n", ["2: 'nobody': write no rank"], id="a comment"),
        pytest.param(
            'def f():\n    """Read.\n\n    A run goes\n    on."""\n', ["4: 'goes on': write continues"], id="two lines"
        ),
        pytest.param(
            'class A:\n    """What it holds."""\n',
            ["2: the docstring begins with 'What': write a noun phrase or an imperative"],
            id="a question",
        ),
        pytest.param('"""Whatever is read."""\n', [], id="a longer word"),
        pytest.param('x = "nobody goes on"\n', [], id="a string"),
    ],
)
def test_docstrings_and_comments_of_a_module_are_checked(text: str, problems: list[str]) -> None:
    assert [f"{line}: {problem}" for line, problem in python_problems(text, WORDS)] == problems


def test_prose_of_a_page_is_checked_and_its_code_is_not() -> None:
    text = "# Runs\n\n```\nnobody\n```\n\nA run `goes on`.\nA run goes on.\n"
    assert list(page_problems(text, WORDS)) == [(8, "'goes on': write continues")]


def test_a_problem_names_file_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nobody.\n", encoding="utf-8")
    assert file_problems(page, WORDS) == [f"{page}:1: 'nobody': write no rank"]


def test_classes_that_share_a_name_are_a_problem(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("class Pod: ...\nclass Engine: ...\n", encoding="utf-8")
    other.write_text("\nclass Pod: ...\n", encoding="utf-8")
    assert class_problems([one, other]) == [f"{one}:1, {other}:2: 2 classes are called Pod: rename all but one"]
    assert class_problems([one]) == []


def test_a_long_subject_is_a_problem() -> None:
    assert subject_problems([f"grpo: {'x' * 66}"]) == []
    assert subject_problems([f"grpo: {'x' * 67}"]) == [f"commit subject of 73 characters, at most 72: grpo: {'x' * 67}"]


def test_a_subject_names_its_part() -> None:
    assert subject_problems(["crds, operator: hold rooms to contracts"]) == []
    assert subject_problems(["Hold rooms to contracts"]) == [
        "commit subject without its part, as in 'grpo: count answers once': Hold rooms to contracts"
    ]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        pytest.param("def found(): ...", ["1: function found"], id="a function of the list"),
        pytest.param("async def _settled(): ...", ["1: function _settled"], id="a bare participle"),
        pytest.param("def read(): ...\ndef packed_documents(): ...", [], id="a verb, and a participle before a noun"),
        pytest.param("def count(told): ...", ["1: parameter told"], id="a parameter"),
        pytest.param("for told in (): ...", ["1: told"], id="a local"),
        pytest.param("reading = found.told", [], id="what is only read"),
    ],
)
def test_names_that_say_nothing_are_a_problem(text: str, problems: list[str]) -> None:
    seen = [(line, problem.partition(":")[0]) for line, problem in identifier_problems(text, {"found"}, {"told"})]
    assert [f"{line}: {name}" for line, name in seen] == problems
