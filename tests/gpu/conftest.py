"""Owns what a machine with a GPU lacks: the trainer may lie there unpacked, not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "trainer" / "src"))
# A run from elsewhere than the root has no pytest.ini that says so.
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(1)
