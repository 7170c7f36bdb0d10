"""A real run answers the prompts of its evaluations: scored, logged, written, and what its export answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.runs import Runs

MOST = 6


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path / "volume")
    yield started
    started.close()


def build_job(questions: Path, **answers: Any) -> dict[str, Any]:
    """A run of two steps, evaluated after each."""
    sets = [{"source": "moejob/tiny-chats", "format": "Chat", "split": "test"}]
    return {
        "data": {"eval": [*sets, {"source": str(questions), "format": "Prompts"}]},
        "training": {
            "maxSteps": 2,
            "evalEvery": 1,
            "bestBy": "evalMean@1",
            "evalAnswers": {"prompts": 3, "maxNewTokens": MOST, **answers},
        },
        "checkpoint": {"exportHuggingFace": True},
        "parallelism": {"pipeline": 2},
    }


def write_records(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def generate_greedily(export: Path, prompt: str) -> str:
    """The answer that Transformers generates greedily with the exported weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    using = AutoTokenizer.from_pretrained(export)
    tokens = torch.tensor([using.encode(prompt, add_special_tokens=False)])
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=MOST,
        # The published configuration has none; runs take it from the tokenizer.
        eos_token_id=using.eos_token_id,
        pad_token_id=0,
    )
    return str(using.decode(found[0, tokens.shape[1] :], skip_special_tokens=True))


@pytest.mark.slow
def test_answers_are_scored_shown_and_those_of_the_export(runs: Runs, tmp_path: Path) -> None:
    asked = ["say hello", "count from one to", "what is the opposite of big", "never asked"]
    questions = write_records(tmp_path, [{"prompt": prompt, "answer": "7"} for prompt in asked])
    run = runs.run_to_end(**build_job(questions))
    lines = [json.loads(line) for line in (run.folder / "steps.jsonl").read_text().splitlines()]
    told = [
        [json.loads(line) for line in (run.folder / "samples" / f"eval-step-{step}.jsonl").read_text().splitlines()]
        for step in (1, 2)
    ]
    assert [[one["prompt"] for one in step] for step in told] == [asked[:3]] * 2
    assert [line["evalMean@1"] for line in lines] == [sum(one["reward"] for one in step) / 3 for step in told]
    assert [line["evalScore"] for line in lines] == [line["evalMean@1"] for line in lines]
    assert all("evalLoss" in line for line in lines)
    assert [one["answer"] for one in told[1]] == [
        generate_greedily(run.folder / "export", prompt) for prompt in asked[:3]
    ]
    assert any(one["answer"] for one in told[1])
    shown = run.board.read_run()
    assert shown is not None
    assert shown.measures["evalMean@1"] == lines[1]["evalMean@1"]


@pytest.mark.slow
def test_a_prompt_without_its_reference_ends_the_run_before_it_trains(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(**build_job(write_records(tmp_path, [{"prompt": "say hello", "result": "hello"}])))
    assert any(run.await_exit_codes())
    assert "has no field answer (it has result)" in run.read_log()
    assert not (run.folder / "steps.jsonl").exists()
