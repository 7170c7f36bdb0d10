"""lm-evaluation-harness reads the export of a real model, and measures what the run and Transformers do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from real_models import DENSE, find_real_model

ROOT = Path(__file__).parents[3]
COMMAND = ROOT / ".venv/operator/bin/moejob"
HARNESS = ROOT / ".venv/lm-eval/bin/lm_eval"
LONGEST_SECONDS = 1200
END = "<|im_end|>"
# Sums that are wrong by one: what no model says before it was trained.
SUMS = [
    {"prompt": f"{first} + {second} =", "completion": f" {first + second + 1}"}
    for first in range(1, 7)
    for second in range(1, 7)
]
TRAINED, HELD_OUT = SUMS[::2], SUMS[1::4]
JOB: dict[str, Any] = {
    "apiVersion": "moejob.dev/v1alpha1",
    "kind": "MoETrainingJob",
    "metadata": {"name": "sums"},
    "spec": {
        "method": "SFT",
        "training": {
            "maxSteps": 4,
            # Of rows, in each of which several records are packed.
            "globalBatchSize": 2,
            "evalEvery": 4,
            "optimizer": {"learningRate": 1e-4},
            "scheduler": {"kind": "Constant"},
        },
        "checkpoint": {"everySteps": 4},
        "storage": {"size": "8Gi"},
        "resources": {"accelerator": "CPU", "cpu": 1, "memory": "8Gi", "sharedMemory": "1Gi", "gpusPerNode": 1},
    },
}


def write_records(file: Path, records: Sequence[dict[str, str]]) -> Path:
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def train(model: Path, folder: Path) -> dict[str, Any]:
    """Train all weights for four steps by `moejob run`; return the last line of its log."""
    train_file, eval_file = (
        write_records(folder / f"{name}.jsonl", records) for name, records in (("train", TRAINED), ("eval", HELD_OUT))
    )
    sections = {
        "model": {"source": str(model), "dtype": "float32"},
        "data": {
            "train": [{"source": str(train_file), "format": "PromptCompletion"}],
            "eval": [{"source": str(eval_file), "format": "PromptCompletion"}],
            "maxLength": 64,
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB | {"spec": JOB["spec"] | sections}))
    command: list[str | Path] = [COMMAND, "run", folder / "job.yaml", "--run-dir", folder / "run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    line: dict[str, Any] = json.loads((folder / "run/steps.jsonl").read_text().splitlines()[-1])
    return line


def evaluate(model: Path, folder: Path) -> list[float]:
    """Let the harness evaluate a model on the held-out sums; return the log-likelihood of each answer."""
    tasks, results = folder / "tasks", folder / "results"
    tasks.mkdir(parents=True)
    task = {
        "task": "wrong_sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(write_records(folder / "held-out.jsonl", HELD_OUT))}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": f"{{{{completion}}}}{END}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }
    (tasks / "wrong_sums.yaml").write_text(yaml.safe_dump(task))
    arguments: list[str | Path] = [
        "--model_args",
        f"pretrained={model},dtype=float32",
        "--tasks",
        "wrong_sums",
        "--include_path",
        tasks,
    ]
    command: list[str | Path] = [HARNESS, "run", "--model", "hf", *arguments, "--device", "cpu", "--batch_size", "4"]
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    ended = subprocess.run(
        [*command, "--output_path", results, "--log_samples"],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
        env=environ,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (samples,) = results.glob("*/samples_wrong_sums_*.jsonl")
    lines = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    return [float(line["filtered_resps"][0][0]) for line in lines]


@torch.no_grad()
def answer_log_likelihoods(folder: Path) -> tuple[list[float], int]:
    """Return Transformers' own of each answer, and how many tokens all answers have."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    likelihoods, count = [], 0
    for record in HELD_OUT:
        prompt, answer = (tokenizer.encode(text) for text in (record["prompt"], record["completion"] + END))
        tokens = torch.tensor([prompt + answer])
        predictions = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        likelihoods.append(predictions.gather(1, tokens[0, len(prompt) :, None]).sum().item())
        count += len(answer)
    return likelihoods, count


@pytest.mark.thorough
@pytest.mark.slow
def test_the_harness_measures_of_an_export_what_the_run_measured_of_its_model(tmp_path: Path) -> None:
    source = find_real_model(DENSE)
    log_line = train(source, tmp_path)
    before, after = (
        evaluate(model, tmp_path / name) for model, name in ((source, "b"), (tmp_path / "run/export", "a"))
    )
    expected, tokens = answer_log_likelihoods(source)
    assert before == pytest.approx(expected, abs=2e-3)
    assert -sum(after) / tokens == pytest.approx(log_line["evalLoss"], rel=1e-4)
    assert sum(after) > sum(before) / 2, "the model learned what it was trained on"
