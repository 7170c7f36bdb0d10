"""Prompts for GRPO: as the model reads them, with what rewards need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moejob_api.job.model import DataFormat, Overlong
from moejob_trainer.data import tiny
from moejob_trainer.data.prompts import Prompts, prompts
from moejob_trainer.errors import BadData
from trainer.training_data import chat, dataset, jsonl, recipe, user


def read(folder: Path, *records: dict[str, Any] | str, most: int = 64, overlong: Overlong = Overlong.DROP) -> Prompts:
    source = dataset(jsonl(folder / "prompts.jsonl", *records), DataFormat.PROMPTS)
    return prompts(source, recipe(source, overlong=overlong), most)


def test_messages_end_where_the_assistant_begins(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": [user("3 + 4")], "answer": "7", "level": 2}).prompts
    assert prompt.text == "<|user|>3 + 4<|end|><|assistant|>"
    assert tiny.tokenizer().decode(list(prompt.tokens)) == prompt.text
    assert prompt.fields == {"answer": "7", "level": 2}
    assert prompt.place == f"{tmp_path}/prompts.jsonl, line 1"


def test_text_is_a_prompt_as_it_is(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": "3 + 4 ="}).prompts
    assert (prompt.text, tiny.tokenizer().decode(list(prompt.tokens))) == ("3 + 4 =", "3 + 4 =")


def test_a_prompt_that_leaves_no_room_for_an_answer_is_dropped_and_counted(tmp_path: Path) -> None:
    found = read(tmp_path, {"prompt": "zzzz"}, {"prompt": "zz"}, most=3)
    assert ([prompt.text for prompt in found.prompts], found.dropped) == (["zz"], 1)


@pytest.mark.parametrize("overlong", [Overlong.REFUSE, Overlong.TRUNCATE])
def test_a_prompt_is_never_cut(tmp_path: Path, overlong: Overlong) -> None:
    with pytest.raises(BadData, match=r"line 1 is a prompt of 4 tokens, room is for 3 .* set overlong to Drop"):
        read(tmp_path, {"prompt": "zzzz"}, most=3, overlong=overlong)


@pytest.mark.parametrize(
    ("record", "most", "said"),
    [
        pytest.param({"question": "a"}, 9, "line 1: there is no prompt; found question", id="another field"),
        pytest.param({"prompt": ""}, 9, 'line 1: prompt is ""; expected text', id="an empty prompt"),
        pytest.param({"prompt": chat("a", "b")["messages"]}, 9, "last message of the prompt is", id="answered already"),
        pytest.param({"prompt": [{"role": "ai", "content": ""}]}, 9, 'message 1 has the role "ai"', id="a wrong role"),
        pytest.param({"prompt": "zzzz"}, 2, "1 prompts, and none of at most 2 tokens", id="none fits"),
        pytest.param({"prompt": "a"}, 0, "maxLength 256 leaves no room for a prompt", id="no room at all"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused(tmp_path: Path, record: dict[str, Any], most: int, said: str) -> None:
    with pytest.raises(BadData, match=said):
        read(tmp_path, record, most=most)


def test_data_of_another_format_is_refused() -> None:
    source = dataset("moejob/tiny-sums", DataFormat.TEXT)
    with pytest.raises(BadData, match="has the format Text; GRPO needs Prompts"):
        prompts(source, recipe(source), 64)


def test_the_sums_that_come_along_are_asked_as_the_chats_ask_them_and_answered_right() -> None:
    source = dataset(tiny.SUMS, DataFormat.PROMPTS)
    found = prompts(source, recipe(source), 64)
    for prompt in found.prompts:
        left, _, right = str(prompt.text.removeprefix("<|user|>").partition("<")[0]).split()
        assert prompt.fields["answer"] == str(int(left) + int(right))
    assert 30 <= len(found.prompts) < 36
