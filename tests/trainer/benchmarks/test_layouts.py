"""The agreement of two orders of layouts, counted by hand."""

from __future__ import annotations

import pytest
import torch
from benchmarks.trainer.gpu_step import job, parsed_cases, parser
from benchmarks.trainer.layouts import LAYOUTS, LayoutSeconds, compared

from moejob_api.derived import global_batch_size
from moejob_api.layout.sizes import gpus
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.rules import layout_problems


@pytest.mark.parametrize(
    ("expected", "tau", "swapped"),
    [
        pytest.param([1.0, 2.0, 3.0], 1.0, [], id="the same order"),
        pytest.param([1.0, 3.0, 2.0], 0.333, [("b", "c")], id="one pair of three"),
        pytest.param([3.0, 2.0, 1.0], -1.0, [("a", "b"), ("a", "c"), ("b", "c")], id="the other way round"),
    ],
)
def test_orders_agree_but_for_the_pairs_that_are_swapped(
    expected: list[float], tau: float, swapped: list[tuple[str, str]]
) -> None:
    found = compared([LayoutSeconds(*one) for one in zip("abc", expected, (0.5, 0.6, 0.7), strict=True)])
    assert found["tau"] == tau
    pairs = found["swapped"]
    assert isinstance(pairs, list)
    assert [(pair["faster"], pair["slower"]) for pair in pairs] == swapped


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_is_two_gpus_with_the_same_batch_and_is_accepted(options: str) -> None:
    chosen = parsed_cases([f"--layers 4 --micro 2 {options}"], parser().parse_args([]))[0]
    spec = job(chosen, torch.device("cuda"))
    assert (gpus(spec.parallelism), global_batch_size(spec)) == (2, 16)
    config = dict(catalog.config(chosen.model) or {}) | {"num_hidden_layers": 4}
    assert not list(layout_problems(spec, shape_of(config, chosen.model)))
