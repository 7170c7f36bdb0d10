"""`moejob run` on GPUs, with the real launcher: what it learns, saves and exports, and a rank that is killed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".venv/operator/bin/moejob"
COMMAND = [str(INSTALLED)] if INSTALLED.exists() else [sys.executable, "-m", "moejob_cli"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.skipif(not (INSTALLED.exists() or find_spec("moejob_cli")), reason="moejob is not installed here"),
]

STEPS = 8
LONGEST_SECONDS = 300.0
_STARTED = re.compile(r"ranks started ranks=\[0[^\]]*\] pids=\[(\d+)")


def write_job(folder: Path, gpus: int, **training: object) -> Path:
    """The example for laptops, on GPUs."""
    made = yaml.safe_load((ROOT / "examples" / "tiny-sft.yaml").read_text())
    spec = made["spec"]
    spec["parallelism"] = {"expert": gpus}
    spec["training"] |= {"maxSteps": STEPS, "evalEvery": STEPS} | training
    spec["checkpoint"] |= {"everySteps": 2, "async": False}
    spec["resources"] |= {"accelerator": "GPU", "gpuType": "H200", "gpusPerNode": gpus, "memory": "12Gi"}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(made))
    return file


def started(file: Path, run: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "MOEJOB_TRAINER_PYTHON": sys.executable}
    command = [*COMMAND, "run", str(file), "--run-dir", str(run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 0, said
    return said


def steps(run: Path) -> list[dict[str, Any]]:
    log = run / "steps.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in steps(run)}


@pytest.mark.parametrize(
    "gpus",
    [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))],
)
def test_a_rank_killed_on_a_gpu_starts_again_in_place_and_changes_no_loss(tmp_path: Path, gpus: int) -> None:
    file = write_job(tmp_path, gpus)
    ended(started(file, tmp_path / "calm"))
    process = started(file, tmp_path / "killed")
    until = time.monotonic() + LONGEST_SECONDS
    while len(steps(tmp_path / "killed")) < 3 and time.monotonic() < until and process.poll() is None:
        time.sleep(0.002)
    found = _STARTED.search((tmp_path / "killed" / "logs" / "pod-0.log").read_text())
    assert found
    os.kill(int(found[1]), signal.SIGKILL)
    assert "restarted in place" in ended(process)

    calm, killed = losses(tmp_path / "calm"), losses(tmp_path / "killed")
    assert list(calm) == list(range(1, STEPS + 1))
    assert killed == pytest.approx(calm, rel=2e-4)
    assert calm[STEPS] < calm[1]
    assert next(line["step"] for line in steps(tmp_path / "killed") if line["restart"] == 1) > 1


def test_an_export_from_a_gpu_is_loaded_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ended(started(write_job(tmp_path, 1), tmp_path / "run"))
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "export", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert torch.isfinite(model(torch.arange(16)[None]).logits).all()


def test_a_deterministic_run_on_a_gpu_computes_the_same_bits_again(tmp_path: Path) -> None:
    file = write_job(tmp_path, 1, deterministic=True, profile={"memory": True})
    for name in ("once", "again"):
        ended(started(file, tmp_path / name))
    once, again = tmp_path / "once", tmp_path / "again"
    assert losses(once) == losses(again)
    assert exported(once)
    assert exported(once) == exported(again)
    traced = sorted(path.name for path in (once / "profile").iterdir())
    assert traced == ["step-2-rank-0.json.gz", "step-2-rank-0.memory.pickle"]
    with (once / "profile" / traced[1]).open("rb") as snapshot:
        assert pickle.load(snapshot)["device_traces"]  # noqa: S301 written by this test's own run


def exported(run: Path) -> dict[str, str]:
    """Digests of the exported weights."""
    files = sorted((run / "export").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
