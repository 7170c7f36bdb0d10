"""Tiles of experts' products: other ones than quack-kernels' own only for what they were measured on."""

from __future__ import annotations

import pytest

from moejob_trainer.layers.kernels.experts import WIDE_TILES, choose_tiles
from moejob_trainer.layers.kernels.quack import Tiles


@pytest.mark.parametrize(
    ("rows_per_expert", "widths", "generation", "expected"),
    [
        pytest.param(4096, (14336, 4096), 9, WIDE_TILES, id="Mixtral's down projection"),
        pytest.param(4096, (4096, 14336), 9, WIDE_TILES, id="the gradient of its rows"),
        pytest.param(4096, (4096, 28672), 9, None, id="Mixtral's gate and up projection"),
        pytest.param(1024, (2048, 1536), 9, None, id="Qwen3's gate and up projection"),
        pytest.param(8192, (768, 2048), 9, None, id="Qwen3's down projection"),
        pytest.param(512, (14336, 4096), 9, None, id="few rows"),
        pytest.param(4096, (14336, 4096), 10, None, id="Blackwell"),
    ],
)
def test_wide_experts_with_many_rows_get_tiles_of_their_own(
    rows_per_expert: float, widths: tuple[int, int], generation: int, expected: Tiles | None
) -> None:
    assert choose_tiles(rows_per_expert, widths, generation) == expected
