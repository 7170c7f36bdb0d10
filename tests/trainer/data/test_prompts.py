"""Prompts for GRPO: as the model reads them, with what rewards need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moejob_api.job.model import DataFormat, Dataset, OverlongSamples
from moejob_trainer.data import tiny
from moejob_trainer.data.blending import DocumentKey
from moejob_trainer.data.prepared_folder import DamagedData
from moejob_trainer.data.prompt_corpus import PromptCorpus
from moejob_trainer.data.prompt_loader import PromptLoader
from moejob_trainer.data.prompt_preparation import prepare_prompts
from moejob_trainer.data.prompts import Prompt, read_prompts
from moejob_trainer.errors import BadData
from trainer.training_data import make_chat, make_recipe, make_source, prompt_corpora, user, write_jsonl


def source_of(folder: Path, *records: dict[str, Any] | str) -> Dataset:
    return make_source(write_jsonl(folder / "prompts.jsonl", *records), DataFormat.PROMPTS)


def read(
    folder: Path, *records: dict[str, Any] | str, most: int = 64, overlong: OverlongSamples = OverlongSamples.DROP
) -> tuple[Prompt, ...]:
    """The prompts, which must be the same whether an evaluation holds them or training reads them from the volume."""
    source = source_of(folder, *records)
    using = make_recipe(source, overlong=overlong)
    held = read_prompts(source, using, most)
    [corpus] = prompt_corpora(folder / "data", using, most)
    assert held == tuple(corpus.read_prompt(number) for number in range(len(corpus)))
    return held


def test_messages_end_where_the_assistant_begins(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": [user("3 + 4")], "answer": "7", "level": 2})
    assert prompt.text == "<|user|>3 + 4<|end|><|assistant|>"
    assert tiny.build_tokenizer().decode(list(prompt.tokens)) == prompt.text
    assert prompt.fields == {"answer": "7", "level": 2}
    assert prompt.place == f"{tmp_path}/prompts.jsonl, line 1"


def test_text_is_a_prompt_as_it_is(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": "3 + 4 ="})
    assert (prompt.text, tiny.build_tokenizer().decode(list(prompt.tokens))) == ("3 + 4 =", "3 + 4 =")


def test_a_prompt_that_leaves_no_room_for_an_answer_is_dropped_and_counted(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"prompt": "zzzz"}, {"prompt": "zz"})
    [corpus] = prompt_corpora(tmp_path / "data", make_recipe(source), 3)
    assert (len(corpus), corpus.read_prompt(0).text) == (1, "zz")
    assert (corpus.report.records, corpus.report.prompts, corpus.report.dropped) == (2, 1, 1)


@pytest.mark.parametrize("overlong", [OverlongSamples.REFUSE, OverlongSamples.TRUNCATE])
def test_a_prompt_is_never_cut(tmp_path: Path, overlong: OverlongSamples) -> None:
    with pytest.raises(BadData, match=r"line 1 is a prompt of 4 tokens, room is for 3 .* set overlong to Drop"):
        read(tmp_path, {"prompt": "zzzz"}, most=3, overlong=overlong)


@pytest.mark.parametrize(
    ("record", "most", "said"),
    [
        pytest.param({"question": "a"}, 9, "line 1: there is no prompt; found question", id="another field"),
        pytest.param({"prompt": ""}, 9, 'line 1: prompt is ""; expected text', id="an empty prompt"),
        pytest.param(
            {"prompt": make_chat("a", "b")["messages"]}, 9, "last message of the prompt is", id="answered already"
        ),
        pytest.param({"prompt": [{"role": "ai", "content": ""}]}, 9, 'message 1 has the role "ai"', id="a wrong role"),
        pytest.param({"prompt": "zzzz"}, 2, "1 prompts, and none of at most 2 tokens", id="none fits"),
        pytest.param({"prompt": "a"}, 0, "maxLength 256 leaves no room for a prompt", id="no room at all"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused(tmp_path: Path, record: dict[str, Any], most: int, said: str) -> None:
    with pytest.raises(BadData, match=said):
        read(tmp_path, record, most=most)


def test_data_of_another_format_is_refused() -> None:
    source = make_source("moejob/tiny-sums", DataFormat.TEXT)
    with pytest.raises(BadData, match="has the format Text; GRPO needs Prompts"):
        read_prompts(source, make_recipe(source), 64)


def test_the_sums_that_come_along_are_asked_as_the_chats_ask_them_and_answered_right() -> None:
    source = make_source(tiny.SUMS, DataFormat.PROMPTS)
    found = read_prompts(source, make_recipe(source), 64)
    for prompt in found:
        left, _, right = str(prompt.text.removeprefix("<|user|>").partition("<")[0]).split()
        assert prompt.fields["answer"] == str(int(left) + int(right))
    assert 30 <= len(found) < 36


QUESTIONS = [{"prompt": f"{n} + 1 =", "answer": n + 1, "hints": [None, {"worth": 0.5}]} for n in range(20)]


def loader(folder: Path, *records: dict[str, Any]) -> PromptLoader:
    using = make_recipe(source_of(folder, *records))
    return PromptLoader(prompt_corpora(folder / "data", using), using.data)


def test_prompts_are_asked_in_the_same_order_behind_a_checkpoint(tmp_path: Path) -> None:
    whole, first, again = (loader(tmp_path, *QUESTIONS) for _ in range(3))
    expected = whole.next_prompts(50)
    assert first.next_prompts(23) == expected[:23]
    again.load_state_dict(first.state_dict())
    assert again.next_prompts(27) == expected[23:]
    assert {one.prompt.text for one in expected[:20]} == {one["prompt"] for one in QUESTIONS}
    # The first ones, wherever a run is, and without moving it.
    assert again.first_prompts(9) == [one.prompt for one in expected[:9]]
    assert again.next_prompts(1)[0].number == 50


def test_a_prompt_that_was_asked_is_read_again_by_its_number_and_document(tmp_path: Path) -> None:
    first, again = (loader(tmp_path, *QUESTIONS) for _ in range(2))
    # More than an epoch, so that documents have several numbers.
    numbered_prompts = first.next_prompts(23)
    again.load_state_dict(first.state_dict())
    for numbered in numbered_prompts:
        assert numbered.key is not None
        assert again.read_again(numbered.number, numbered.key) == numbered
    assert again.next_prompts(1) == first.next_prompts(1)


@pytest.mark.parametrize(
    ("number", "key", "said"),
    [
        pytest.param(3, DocumentKey(0, 0), "prompt 3, and its data cursor stands behind 3 prompts", id="never asked"),
        pytest.param(-1, DocumentKey(0, 0), "unfinished prompt -1", id="a negative number"),
        pytest.param(0, DocumentKey(1, 0), "document 0 of source 1, .* sources of 20 documents", id="another source"),
        pytest.param(0, DocumentKey(0, 20), "document 20 of source 0", id="behind the last document"),
        pytest.param(0, DocumentKey(0, -1), "document -1 of source 0", id="before the first document"),
    ],
)
def test_a_prompt_that_was_never_asked_is_not_read(tmp_path: Path, number: int, key: DocumentKey, said: str) -> None:
    prompts = loader(tmp_path, *QUESTIONS)
    prompts.next_prompts(3)
    with pytest.raises(BadData, match=said):
        prompts.read_again(number, key)


def test_the_same_prompts_from_another_place_resume(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    moved = loader(there, *QUESTIONS)
    moved.load_state_dict(loader(here, *QUESTIONS).state_dict())
    assert len(moved.next_prompts(3)) == 3


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param([*QUESTIONS[:19], {"prompt": "19 + 1 =", "answer": 21}], id="another answer"),
        pytest.param([*QUESTIONS[:19], {"prompt": "18 + 1 =", "answer": 20}], id="another prompt"),
        pytest.param([*QUESTIONS[:18], QUESTIONS[19], QUESTIONS[18]], id="another order"),
    ],
)
def test_other_prompts_than_those_of_the_checkpoint_are_refused(tmp_path: Path, changed: list[dict[str, Any]]) -> None:
    state = loader(tmp_path, *QUESTIONS).state_dict()
    with pytest.raises(BadData, match="the data, its weights, its seed or the tokenizer changed"):
        loader(tmp_path, *changed).load_state_dict(state)


def test_prompts_that_are_prepared_are_not_tokenized_again(tmp_path: Path) -> None:
    using = make_recipe(source_of(tmp_path, *QUESTIONS))
    [first] = prepare_prompts(using.data.train, using, 64, tmp_path / "data")
    written = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    assert prepare_prompts(using.data.train, using, 64, tmp_path / "data") == (first,)
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == written
    [shorter] = prepare_prompts(using.data.train, using, 63, tmp_path / "data")
    assert shorter != first


def test_prompts_that_were_damaged_are_found(tmp_path: Path) -> None:
    using = make_recipe(source_of(tmp_path, *QUESTIONS))
    [folder] = prepare_prompts(using.data.train, using, 64, tmp_path / "data")
    lines = folder / "prompts.jsonl"
    lines.write_bytes(lines.read_bytes()[:-1])
    with pytest.raises(DamagedData, match="was damaged since it was written; the next start"):
        PromptCorpus(folder)
    assert not (folder / "report.json").exists()
    with pytest.raises(DamagedData, match="does not hold prepared prompts"):
        PromptCorpus(folder)


def test_a_prompt_that_is_as_long_as_before_and_another_is_found_when_it_is_read(tmp_path: Path) -> None:
    using = make_recipe(source_of(tmp_path, *QUESTIONS))
    [folder] = prepare_prompts(using.data.train, using, 64, tmp_path / "data")
    lines = folder / "prompts.jsonl"
    lines.write_bytes(lines.read_bytes().replace(b'"answer": 20', b'"answer": 21'))
    corpus = PromptCorpus(folder)
    assert corpus.read_prompt(18).fields["answer"] == 19
    with pytest.raises(DamagedData, match="was damaged since it was written; the next start"):
        corpus.read_prompt(19)
    [again] = prepare_prompts(using.data.train, using, 64, tmp_path / "data")
    assert PromptCorpus(again).read_prompt(19).fields["answer"] == 20


@pytest.mark.parametrize("name", ["prompts.jsonl", "places.npy", "report.json"])
def test_prepared_prompts_that_lost_a_file_are_built_again_by_the_next_start(tmp_path: Path, name: str) -> None:
    using = make_recipe(source_of(tmp_path, *QUESTIONS))
    [folder] = prepare_prompts(using.data.train, using, 64, tmp_path / "data")
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / name).write_bytes(b"")
    assert prepare_prompts(using.data.train, using, 64, tmp_path / "data") == (folder,)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole


def test_several_processes_prepare_the_same_prompts(tmp_path: Path) -> None:
    using = make_recipe(source_of(tmp_path, *({"prompt": f"{n} + 1 ="} for n in range(5_000))))
    [alone] = prepare_prompts(using.data.train, using, 64, tmp_path / "alone")
    [together] = prepare_prompts(using.data.train, using, 64, tmp_path / "together", workers=2)
    assert {path.name: path.read_bytes() for path in alone.iterdir()} == {
        path.name: path.read_bytes() for path in together.iterdir()
    }
