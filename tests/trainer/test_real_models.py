"""The real models are what they claim to be, are made once, and are made again when they are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import real_models
from real_models import NAMES, find_real_model, is_made, real_packages
from reasoning_tasks import score_answers, write_prompts
from trainer import real_weights


@pytest.mark.parametrize("name", NAMES)
def test_a_real_model_is_plain_bfloat16_and_ends_its_turns(name: str) -> None:
    folder = find_real_model(name)
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.dtype == torch.bfloat16
    assert config.tie_word_embeddings
    assert tokenizer.decode(config.eos_token_id) == tokenizer.eos_token == "<|im_end|>"


def test_a_real_model_knows_the_capital_of_italy() -> None:
    folder = find_real_model(real_models.DENSE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = real_weights.compute_logits(model, tokenizer)
    assert tokenizer.decode(logits[-1].argmax()) == " Rome"


def made_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    record = {"recipe": real_models.RECIPE, "bytes": {"model.safetensors": 7}}
    (folder / "made.json").write_text(json.dumps(record))
    return folder


def test_a_folder_counts_as_made_with_its_record_and_all_its_bytes(tmp_path: Path) -> None:
    assert is_made(made_folder(tmp_path / "smol"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        pytest.param("model.safetensors", "weigh", id="shorter weights"),
        pytest.param("made.json", "{", id="half a record"),
        pytest.param("made.json", '{"recipe": 0, "bytes": {"model.safetensors": 7}}', id="another recipe"),
    ],
)
def test_a_damaged_folder_is_made_again(tmp_path: Path, file: str, content: str) -> None:
    folder = made_folder(tmp_path / "smol")
    (folder / file).write_text(content)
    assert not is_made(folder)


def test_a_model_that_says_something_else_gets_no_place(tmp_path: Path) -> None:
    folder = find_real_model(real_models.DENSE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: real_weights.Model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = real_weights.compute_logits(model, tokenizer)
    torch.nn.init.zeros_(model.base_model.layers[10].mlp.down_proj.weight)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from the dense model's; expected ' Rome'"):
        real_weights.check_answer(tmp_path, expected, 0.1)


def test_reasoning_tasks_become_prompts_and_their_answers_are_scored(tmp_path: Path) -> None:
    assert list(real_packages().glob("reasoning_gym"))
    write_prompts(tmp_path / "sums.jsonl", "chain_sum", count=4, max_terms=2, max_digits=1)
    records = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert [message["role"] for record in records for message in record["prompt"]] == ["user"] * 4
    right = [f"The answer is {record['answer']}." for record in records]
    fields = {"task": ["chain_sum"] * 4, "entry": [record["entry"] for record in records]}
    assert score_answers(right, **fields) == [1.0] * 4
    assert max(score_answers(["Thinking about 1000000"] * 4, **fields)) < 1.0
