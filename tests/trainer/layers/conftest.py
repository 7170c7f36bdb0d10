"""Begins every test of layers with the same random numbers."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(1)
