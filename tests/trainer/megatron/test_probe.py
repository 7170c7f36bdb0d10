"""The text of the probe, and the bound that follows from rounding."""

from __future__ import annotations

import pytest
import torch

from moejob_trainer.megatron.probe import probe_bound, probe_text


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        pytest.param([[1, 2, 3], [4, 5, 6], [7]], [1, 2, 3, 4, 5], id="prompts one after another, cut"),
        pytest.param([[1, 2], [3]], [1, 2, 3, 1, 2], id="few short prompts are said again"),
    ],
)
def test_a_probe_is_made_of_the_prompts_of_the_run(prompts: list[list[int]], expected: list[int]) -> None:
    assert probe_text(prompts, 5) == expected


@pytest.mark.parametrize(
    ("dtype", "rounding", "expected"),
    [
        pytest.param(torch.float32, 7e-6, 1e-3, id="float32 stays tight"),
        pytest.param(torch.bfloat16, 0.002, 0.01, id="small logits"),
        pytest.param(torch.bfloat16, 0.07, 0.28, id="logits of a trained model"),
    ],
)
def test_the_bound_is_four_times_the_effect_of_rounding(dtype: torch.dtype, rounding: float, expected: float) -> None:
    assert probe_bound(dtype, rounding) == pytest.approx(expected)
