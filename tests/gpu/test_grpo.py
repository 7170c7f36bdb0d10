"""GRPO of published models on GPUs, as users run it: bfloat16, temperature 0.9, rewards on sums, engines of every size.

The models are those of `make real-models`; without them these tests are skipped by name. Each run makes
three steps, so weights are published, engines sleep and wake, and answers are learned from more than once.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.grpo_learning.jobs import write_job
from benchmarks.grpo_learning.models import write_divisible
from benchmarks.grpo_learning.runs import ROOT, engine_logs, last_words, read_steps, run_job

from gpu.grpo_cases import CASES, STEPS, Case, case_job
from real_models import cache_folder

safetensors = pytest.importorskip("safetensors.torch")

ENGINES = Path(os.environ.get("MOEJOB_ROLLOUT_PYTHON", ROOT / ".venv/rollout/bin/python"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.skipif(
        not ((ROOT / ".venv/operator/bin/moejob").exists() or find_spec("moejob_cli")),
        reason="moejob is not installed here",
    ),
    pytest.mark.skipif(
        not os.access(ENGINES, os.X_OK), reason="no Python with vLLM here; MOEJOB_ROLLOUT_PYTHON names one"
    ),
]

LONGEST_SECONDS = 580.0
# Mean |log-probability of the trainer - of the engine| of the answers' tokens. Both round to bfloat16, each in its own
# order; a tensor that was left out or divided wrongly makes it 1 and more.
MOST_MISMATCH = 0.05
PROMPT, ANSWER = "The capital of France is Paris. The capital of Italy is", "Rome"


@pytest.mark.parametrize("name", CASES)
def test_a_published_model_learns_beside_its_engines(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if torch.cuda.device_count() < case.gpus:
        pytest.skip(f"needs {case.gpus} GPUs")
    model = model_folder(case, tmp_path)
    run = tmp_path / "run"
    code, printed = run_job(
        write_job(case_job(case, model, tmp_path, gpu_type()), tmp_path / "job.json"),
        run,
        LONGEST_SECONDS,
        visible_gpus(case),
    )
    assert code == 0, last_words(run, printed)
    assert_steps(read_steps(run))
    if case.is_colocated:
        assert_slept(engine_logs(run), engines=case.gpus // case.engine_tensor)
    assert changed_tensors(model, run / "export")
    assert ANSWER in greedy_answer(run / "export")


def gpu_type() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
    return next((kind for kind in ("GB200", "B200", "H200", "H100", "A100") if kind in name), "H100")


def visible_gpus(case: Case) -> str:
    """The job's GPUs, the first of those that this process may use: so two jobs can share a machine."""
    if case.visible:
        return case.visible
    usable = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return ",".join(usable.split(",")[: case.gpus])


def model_folder(case: Case, folder: Path) -> Path:
    """The published model, with heads that its engine can divide."""
    published = cache_folder() / case.model
    if not published.is_dir():
        pytest.skip(f"{published} is not there: make real-models writes it")
    return published if case.engine_tensor == 1 else write_divisible(folder / "divisible", published)


def assert_steps(steps: list[dict[str, Any]]) -> None:
    assert [step["step"] for step in steps] == [*range(1, STEPS + 1)]
    told = [
        {name: step[name] for name in ("reward", "mismatchMean", "mismatchMaximum", "probeMean", "probeBound")}
        for step in steps
    ]
    assert all(step["mismatchMean"] < MOST_MISMATCH for step in steps), told
    # A probe that is nothing has compared nothing.
    assert all(0 < step["probeMean"] <= step["probeBound"] for step in steps), told
    assert any(step["reward"] > 0 for step in steps), told
    assert all(step["gradNorm"] > 0 for step in steps if step["groupsWithoutSignal"] < step["groups"]), told


def assert_slept(log: str, engines: int) -> None:
    """Each engine has slept after each step, and was awake for its answers."""
    assert log.count("seconds to fall asleep") >= STEPS * engines, log[-4000:]
    assert log.count("seconds to wake up") >= STEPS * engines, log[-4000:]


def changed_tensors(before: Path, after: Path) -> list[str]:
    """Names of the tensors that training has moved; both folders have the same ones."""
    old, new = read_tensors(before), read_tensors(after)
    assert {*old} == {*new}
    assert all(tensor.isfinite().all() for tensor in new.values())
    return [name for name, tensor in old.items() if not torch.equal(tensor, new[name])]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in folder.glob("*.safetensors") for name, tensor in safetensors.load_file(file).items()
    }


def greedy_answer(folder: Path) -> str:
    """The answer of an export, read by Transformers as users do."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"], loading
    assert not loading["unexpected_keys"], loading
    prompt = tokenizer(PROMPT, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    return str(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :]))
