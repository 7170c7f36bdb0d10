"""The tiny model trains on a GPU as it does on the CPU, through the same code."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

PROGRAM = Path(__file__).with_name("training.py")


@cache
def trained(device: str, dtype: str) -> dict[str, list[float]]:
    done = subprocess.run([sys.executable, PROGRAM, device, dtype], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("dtype", "within"),
    [
        pytest.param("float32", 2e-4, id="float32"),
        # Routing flips where two experts are nearly alike: a few tokens go elsewhere.
        pytest.param("bfloat16", 2e-2, id="bfloat16"),
    ],
)
def test_a_gpu_trains_what_the_cpu_trains(dtype: str, within: float) -> None:
    here, reference = trained("cuda", dtype), trained("cpu", "float32")
    assert here["losses"] == pytest.approx(reference["losses"], rel=within)
    assert here["norms"] == pytest.approx(reference["norms"], rel=10 * within)
    assert reference["losses"][-1] < reference["losses"][0] - 0.3, "the reference itself does not learn"
