"""Evaluation sets are named by what a reader calls them, and no two alike."""

from __future__ import annotations

from typing import Any

import pytest

from builders import spec
from moejob_api.job.evaluations import comparison_measure, evaluation_measures, set_names
from moejob_api.job.model import DataFormat, Dataset
from moejob_api.rules import layout_problems


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["/data/held-out.jsonl"], ("held-out",)),
        (["org/chats[test]", "pvc://claim/sums.jsonl.gz"], ("chats-test", "sums")),
        (["/a/chats.jsonl", "/b/chats.jsonl", "/c/sums.jsonl"], ("chats-1", "chats-2", "sums")),
    ],
)
def test_a_set_is_named_by_its_file_or_repository(sources: list[str], names: tuple[str, ...]) -> None:
    datasets = [
        Dataset(source=source, split=split.removesuffix("]") or "train", format=DataFormat.CHAT)
        for source, _, split in (one.partition("[") for one in sources)
    ]
    assert set_names(datasets) == names


SETS = [{"source": "/data/a.jsonl", "format": "Chat"}, {"source": "/data/b.jsonl", "format": "Chat"}]
PROMPTS = [{"source": "/data/a.jsonl", "format": "Prompts"}]
ANSWERS: dict[str, Any] = {"method": "GRPO", "data": {"eval": PROMPTS}, "grpo": {"evaluation": {"samples": 4}}}


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        pytest.param({}, (), id="nothing is evaluated"),
        pytest.param({"data": {"eval": SETS[:1]}}, ("evalLoss",), id="one set is all sets"),
        pytest.param({"data": {"eval": SETS}}, ("evalLoss", "evalLoss/a", "evalLoss/b"), id="several sets"),
        pytest.param(ANSWERS, ("evalMean@4", "evalPass@4"), id="answers"),
        pytest.param({"data": {"eval": PROMPTS}}, ("evalMean@1",), id="answers of SFT"),
        pytest.param({"data": {"eval": [SETS[0], *PROMPTS]}}, ("evalLoss", "evalMean@1"), id="a loss and answers"),
    ],
)
def test_evaluations_are_compared_by_numbers_that_they_have(sections: dict[str, Any], names: tuple[str, ...]) -> None:
    assert evaluation_measures(spec(**sections)) == names
    assert comparison_measure(spec(**sections)) == (names[0] if names else None)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        pytest.param({"data": {"eval": SETS}, "training": {"bestBy": "evalLoss/b"}}, None, id="one of several sets"),
        pytest.param(
            {"data": {"eval": SETS}, "training": {"bestBy": "evalLoss/c"}},
            "no evaluation of this job has evalLoss/c; use evalLoss or evalLoss/a or evalLoss/b",
            id="a set that is not there",
        ),
        pytest.param(ANSWERS | {"training": {"bestBy": "evalLoss"}}, "use evalMean@4 or evalPass@4", id="GRPO's loss"),
        pytest.param({"training": {"bestBy": "evalLoss"}}, "add data.eval or remove it", id="nothing is evaluated"),
    ],
)
def test_a_measure_that_no_evaluation_has_is_refused(sections: dict[str, Any], says: str | None) -> None:
    found = [problem.message for problem in layout_problems(spec(**sections), None) if problem.path.endswith("bestBy")]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]
