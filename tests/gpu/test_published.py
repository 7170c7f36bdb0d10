"""A published model computes on a GPU what Transformers makes of it, and one with a mistake does not pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

PROGRAM = Path(__file__).with_name("published.py")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_read_onto_a_gpu_is_what_is_published(dtype: str) -> None:
    done = subprocess.run([sys.executable, PROGRAM, dtype], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["right"] == ""
    assert "computes something else than Transformers: layer 0 (" in said["mistaken"]
