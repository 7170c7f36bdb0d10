"""The agreement of two orders of layouts, counted by hand."""

from __future__ import annotations

import pytest
import torch
from benchmarks.trainer.gpu_step import job, parsed_cases, parser
from benchmarks.trainer.layouts import ALIKE, LAYOUTS, LayoutSeconds, compare_orders

from moejob_api.derived import global_batch_size
from moejob_api.layout.sizes import count_gpus as gpus_of
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
    found = compare_orders([LayoutSeconds(*one) for one in zip("abc", expected, (0.5, 0.6, 0.7), strict=True)])
    assert found["tau"] == tau
    pairs = found["swapped"]
    assert isinstance(pairs, list)
    assert [(pair["faster"], pair["slower"]) for pair in pairs] == swapped


OF_GPUS = [
    pytest.param(gpus, options, id=f"{gpus} GPUs: {name}")
    for gpus, layouts in LAYOUTS.items()
    for name, options in layouts.items()
]


@pytest.mark.parametrize(("gpus", "options"), OF_GPUS)
def test_every_layout_has_its_gpus_and_the_same_batch_and_is_accepted(gpus: int, options: str) -> None:
    chosen = parsed_cases([f"{ALIKE[gpus]} {options}"], parser().parse_args([]))[0]
    spec = job(chosen, torch.device("cuda"))
    assert (gpus_of(spec.parallelism), global_batch_size(spec)) == (gpus, 8 * gpus)
    config = dict(catalog.find_config(chosen.model) or {}) | {"num_hidden_layers": chosen.layers}
    assert not list(layout_problems(spec, shape_of(config, chosen.model)))
