"""Stand-ins for CUDA in Megatron's models: parts of different lengths are exchanged as on a GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from moejob_trainer.megatron_models.cpu import MODULES, use_cpu_models
from trainer.worlds import Worlds


def exchange_parts() -> tuple[list[float], list[float]]:
    """Rank 0 has one row, rank 1 three; then each gets the sum of its own rows."""
    use_cpu_models()
    mappings = import_module("megatron.core.tensor_parallel.mappings")
    rank, sizes = dist.get_rank(), [1, 3]
    part = torch.arange(sizes[rank]) + 10.0 * rank
    gathered = mappings._gather_along_first_dim(part, dist.group.WORLD, sizes)  # noqa: SLF001 what layers call
    summed = mappings._reduce_scatter_along_first_dim(gathered, dist.group.WORLD, sizes)  # noqa: SLF001
    return gathered.tolist(), summed.tolist()


def test_parts_of_different_lengths_keep_their_rows(worlds: Worlds) -> None:
    first, second = worlds.run(2, exchange_parts)
    assert first == ([0, 10, 11, 12], [0])
    assert second == ([0, 10, 11, 12], [20, 22, 24])


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_makes_tensors_on_the_device_is_still_one_of_megatrons(name: str) -> None:
    assert import_module(f"megatron.core.{name}").__name__.endswith(name)
