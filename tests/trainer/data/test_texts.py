"""Formats without turns: prompt and completion, and plain text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moejob_api.job.model import DataFormat
from moejob_trainer.data import tiny
from moejob_trainer.data.encoding import RecordKind, Sample, build_encoder
from moejob_trainer.data.records import Record
from moejob_trainer.errors import BadData


def encoded(format: DataFormat, using: PreTrainedTokenizerBase, **fields: Any) -> Sample:  # noqa: A002
    return build_encoder(RecordKind(format), using, None)(Record(fields, "texts.jsonl, line 2"))


def words(bos: str | None = "<s>", eos: str | None = "</s>") -> PreTrainedTokenizerBase:
    """As SentencePiece does it: a blank before every text, and a token that begins it."""
    names = ["<s>", "</s>", "?", "▁the", "▁cat", "▁sat", "▁", "s", "at"]
    tokens = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="?"))
    tokens.pre_tokenizer = pre_tokenizers.Metaspace()
    tokens.decoder = decoders.Metaspace()
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token=bos, eos_token=eos, unk_token="?")


def test_of_prompt_and_completion_only_the_completion_and_its_end_are_trained_on() -> None:
    using = tiny.build_tokenizer()
    sample = encoded(DataFormat.PROMPT_COMPLETION, using, prompt="3 + 4 =", completion=" 7")
    assert using.decode(sample.tokens) == "3 + 4 = 7<|end|>"
    assert using.decode(sample.tokens[sample.trained_mask]) == " 7<|end|>"


def test_a_prompt_is_tokenized_as_if_the_completion_did_not_exist() -> None:
    using = tiny.build_tokenizer()
    sample = encoded(DataFormat.PROMPT_COMPLETION, using, prompt="co", completion="unt")
    prompt = using("co")["input_ids"]
    assert sample.tokens[: len(prompt)].tolist() == prompt
    # Together they are one token, of which nothing could be trained on.
    assert len(using("count")["input_ids"]) == 1


def test_all_of_a_text_is_trained_on_but_its_first_token_which_nothing_predicts() -> None:
    sample = encoded(DataFormat.TEXT, words(), text="the cat sat")
    assert sample.tokens.tolist() == [0, 3, 4, 5, 1]
    assert sample.trained_mask.tolist() == [False, True, True, True, True]


def test_a_tokenizer_that_writes_two_parts_differently_apart_is_refused() -> None:
    with pytest.raises(BadData, match=r"line 2: the tokenizer writes prompt and completion differently .* format Chat"):
        encoded(DataFormat.PROMPT_COMPLETION, words(), prompt="the", completion="cat")


@pytest.mark.parametrize(
    ("format", "fields", "said"),
    [
        pytest.param(DataFormat.TEXT, {"content": "a"}, "line 2: there is no text; found content", id="another field"),
        pytest.param(DataFormat.TEXT, {"text": ""}, 'line 2: text is ""; expected text', id="an empty text"),
        pytest.param(DataFormat.TEXT, {"text": 3}, "line 2: text is 3; expected text", id="a number"),
        pytest.param(DataFormat.TEXT, {"text": None}, "line 2: text is absent; expected text", id="null"),
        pytest.param(DataFormat.PROMPT_COMPLETION, {"prompt": "a"}, "there is no completion", id="no completion"),
        pytest.param(
            DataFormat.PROMPT_COMPLETION,
            {"prompt": "a", "completion": ""},
            'completion is ""',
            id="an empty completion",
        ),
        pytest.param(DataFormat.PROMPTS, {"prompt": "a"}, "has nothing to train on", id="prompts"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused_with_the_place(
    format: DataFormat,  # noqa: A002
    fields: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(BadData, match=said):
        encoded(format, tiny.build_tokenizer(), **fields)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(BadData, match="no eos_token, so a model trained with it would never stop"):
        encoded(DataFormat.TEXT, words(eos=None), text="the cat")
