"""Threads of ranks on the CPU, and algorithms on any device: sums in another order would be other sums."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from moejob_trainer.layers.kernels.attention import flash_supports
from moejob_trainer.runtime.devices import compute_deterministically, share_cores


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """As many as before, afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_ranks_of_one_pod_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    share_cores(100_000)
    assert torch.get_num_threads() == 1


def test_a_job_that_says_how_many_threads_its_ranks_have_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    share_cores(100_000)
    assert torch.get_num_threads() == 3


@pytest.fixture
def algorithms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any algorithms again, afterwards."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        # Set, so that it is known to be put back, and then as if no one had.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("algorithms")
def test_deterministic_algorithms_have_what_cublas_and_nccl_need() -> None:
    compute_deterministically()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "^NVLS"


@pytest.mark.usefixtures("algorithms")
def test_what_a_job_says_to_nccl_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    compute_deterministically()
    assert os.environ["NCCL_ALGO"] == "Ring"


@pytest.mark.usefixtures("algorithms")
def test_attention_that_adds_with_atomics_is_not_deterministic() -> None:
    hopper = (torch.bfloat16, (128, 128), 9)
    assert flash_supports(*hopper)
    compute_deterministically()
    assert not flash_supports(*hopper)
