"""How many threads ranks on the CPU compute with: sums in another order would be other sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moejob_trainer.devices import share_cores


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
