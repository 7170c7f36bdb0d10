"""Products of bfloat16 are the same on CPUs with and without instructions for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moejob_trainer.layers.precision import needs_widening
from trainer.layers import products

# The widths of bfloat16's steps, by the largest number of a tensor: the same sum may be rounded either way.
STEP = 2.0**-7
OLD_CPU = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The products of a CPU without instructions for bfloat16."""
    file = tmp_path_factory.mktemp("products") / "products.safetensors"
    command = [sys.executable, "-W", "ignore", products.__file__, str(file)]
    environ = {**os.environ, **OLD_CPU, "PYTHONPATH": str(Path(products.__file__).parents[2])}
    subprocess.run(command, env=environ, check=True)
    return load_file(file)


def test_a_cpu_without_such_instructions_multiplies_widened_numbers(computed: dict[str, Tensor]) -> None:
    assert computed["is widened"].item()


@pytest.mark.parametrize("kind", ["grouped", "dense", "scores"])
def test_products_of_widened_numbers_are_those_of_torch(computed: dict[str, Tensor], kind: str) -> None:
    ours = {name.split(" ", 1)[1]: tensor for name, tensor in computed.items() if name.startswith(f"ours {kind}")}
    assert len(ours) >= 3
    for name, tensor in ours.items():
        expected = computed[f"torch {name}"]
        apart = (tensor.float() - expected.float()).abs().max()
        assert apart <= STEP * expected.float().abs().max(), name
        assert expected.abs().max() > 0


@pytest.mark.parametrize("kind", ["grouped", "dense"])
def test_they_are_those_of_this_cpu(computed: dict[str, Tensor], kind: str) -> None:
    for name, tensor in products.compute_products().items():
        if name.startswith(f"ours {kind}"):
            apart = (tensor.float() - computed[name].float()).abs().max()
            assert apart <= STEP * tensor.float().abs().max(), name


@pytest.mark.parametrize(
    ("device", "dtype", "has_products", "expected"),
    [
        pytest.param("cpu", torch.bfloat16, False, True, id="an old CPU"),
        pytest.param("cpu", torch.bfloat16, True, False, id="a CPU with instructions"),
        pytest.param("cpu", torch.float32, False, False, id="float32"),
        pytest.param("cuda", torch.bfloat16, False, False, id="a GPU beside an old CPU"),
    ],
)
def test_only_bfloat16_on_a_cpu_without_instructions_is_widened(
    device: str, dtype: torch.dtype, *, has_products: bool, expected: bool
) -> None:
    assert needs_widening(device, dtype, has_bfloat16_products=has_products) is expected
