"""Evaluation sets are named by what a reader calls them, and no two alike."""

from __future__ import annotations

import pytest

from moejob_api.job.model import DataFormat, Dataset
from moejob_trainer.setup.evaluation import set_names


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
