"""Threads of ranks on the CPU, GPUs that have no FP8, and algorithms: sums in another order would be other sums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from builders import spec
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.layers.kernels.attention import is_flash_supported
from moejob_trainer.runtime.devices import compute_deterministically, share_cores, start_device


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
def gpu(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The compute capability of the only GPU here."""
    capability = Mock()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(dist, "init_process_group", Mock())
    return capability


def test_a_gpu_without_fp8_products_is_refused_by_its_rank(gpu: Mock) -> None:
    gpu.return_value = (8, 9)
    float8, plain = Mock(local_rank=0, store_port=None), Mock(local_rank=0, store_port=None)
    float8.spec, plain.spec = spec(training={"precision": {"compute": "FP8"}}), spec()
    with pytest.raises(BadConfiguration, match=r"compute capability 9\.0 or later, and NVIDIA L4 has 8\.9; remove"):
        start_device(float8)
    assert start_device(plain) == torch.device("cuda", 0)
    gpu.return_value = (9, 0)
    assert start_device(float8) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        pytest.param(1, TransientFailure, id="one of several is lost"),
        pytest.param(0, BadConfiguration, id="a pod that asked for none"),
    ],
)
def test_a_pod_that_lost_a_gpu_is_tried_on_another_node(
    gpu: Mock, monkeypatch: pytest.MonkeyPatch, count: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    rank = Mock(local_rank=1, store_port=None)
    rank.spec = spec()
    with pytest.raises(kind, match=rf"needs GPU 1 of its pod, which has {count}; check the device plugin"):
        start_device(rank)
    gpu.assert_not_called()


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
    assert is_flash_supported(*hopper)
    compute_deterministically()
    assert not is_flash_supported(*hopper)
