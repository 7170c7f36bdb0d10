"""Sources of tokenizers, and the built-in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_api.models import catalog
from moejob_trainer.data import tiny
from moejob_trainer.data.tokenizers import load_tokenizer, locate_source
from moejob_trainer.errors import BadData

TINY = tiny.build_tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_the_tiny_tokenizer(text: str) -> None:
    if not any(special in text for special in TINY.all_special_tokens):
        assert TINY.decode(TINY(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_the_tiny_tokenizer_fits_the_tiny_model() -> None:
    config = catalog.find_config("moejob/tiny-moe")
    assert config is not None
    assert len(TINY) <= config["vocab_size"]  # type: ignore[operator]
    assert sorted(TINY.get_vocab().values()) == list(range(len(TINY)))
    assert (TINY.pad_token_id, TINY.eos_token_id) == (0, 1)


def test_the_tiny_tokenizer_stays_what_it_is() -> None:
    # Written down once: a checkpoint of any earlier version means these tokens.
    assert TINY("what is the opposite of up")["input_ids"] == [487, 264, 267, 286, 269, 414]


def test_a_tokenizer_that_was_saved_is_the_same_again(tmp_path: Path) -> None:
    TINY.save_pretrained(tmp_path / "claim" / "model")
    again = load_tokenizer("pvc://claim/model", claims=tmp_path)
    messages = [{"role": "user", "content": "count from 3 to 9"}, {"role": "assistant", "content": "3 4 5"}]
    assert again.apply_chat_template(messages, tokenize=False) == TINY.apply_chat_template(messages, tokenize=False)
    assert again.get_vocab() == TINY.get_vocab()
    assert (again.eos_token_id, again.pad_token_id) == (TINY.eos_token_id, TINY.pad_token_id)
    assert load_tokenizer(str(tmp_path / "claim" / "model")).get_vocab() == TINY.get_vocab()


def test_the_built_in_name_needs_nothing_on_disk() -> None:
    assert load_tokenizer("moejob/tiny-moe").get_vocab() == TINY.get_vocab()


def test_a_claim_is_found_where_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert locate_source("pvc://models/a/b", tmp_path) == f"{tmp_path}/models/a/b"
    assert locate_source("pvc://models", tmp_path) == f"{tmp_path}/models"
    assert locate_source("organization/name", tmp_path) == "organization/name"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_a_model_without_a_tokenizer_says_what_to_do(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(
        BadData, match=r"no tokenizer can be read from .*put tokenizer.json and tokenizer_config.json be"
    ):
        load_tokenizer(str(tmp_path))


def test_a_broken_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    TINY.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadData, match=f"no tokenizer can be read from {tmp_path}"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param(
            "/none", "there is no folder /none to read the tokenizer of model.source /none from", id="no folder"
        ),
        pytest.param("organization/none", "no tokenizer can be read from organization/none", id="not on the hub"),
        pytest.param("pvc://none/model", "claim none of pvc://none/model is not mounted", id="no such claim"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(BadData, match=said):
        load_tokenizer(source, claims=tmp_path)
