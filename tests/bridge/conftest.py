"""Owns a process group of one, which Megatron asks for whatever it does."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Libraries read these when they are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# Megatron compiles what it fuses, for a GPU.
os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
