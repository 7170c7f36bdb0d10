"""The tokens that end an answer, as a published model names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moejob_trainer.data.end_tokens import published_end_tokens
from moejob_trainer.errors import BadConfiguration


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param('{"eos_token_id": 2}', [2], id="one"),
        pytest.param('{"eos_token_id": [2, 7]}', [2, 7], id="several"),
        pytest.param('{"eos_token_id": null}', [], id="null"),
        pytest.param("{}", [], id="none"),
        pytest.param("[]", [], id="no object"),
    ],
)
def test_a_model_says_which_tokens_end_an_answer(text: str, tokens: list[int], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    assert published_end_tokens(tmp_path) == tokens


def test_a_model_without_a_generation_config_names_none(tmp_path: Path) -> None:
    assert published_end_tokens(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", r"generation_config\.json is not JSON .*download it again, or remove it", id="cut off"),
        pytest.param("[" * 100_000, r"is not JSON \(it is nested too deeply\)", id="without a floor"),
        pytest.param(
            '{"eos_token_id": "</s>"}', r"eos_token_id of .* is </s>; it has to be a token's number", id="a text"
        ),
    ],
)
def test_a_generation_config_that_says_nothing_is_refused_for_good(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(BadConfiguration, match=message):
        published_end_tokens(tmp_path)
