"""Routers are called collapsed by the load of several steps, layer by layer, and recover at another load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moejob_api.router_health import COLLAPSE_STEPS
from moejob_trainer.tracking.router_watch import RouterWatch
from moejob_trainer.tracking.signal_log import RouterLog
from moejob_trainer.training import ExpertCounts

# Eight experts of which each token takes two: a layer collapses at exp(entropy) 2.5, and recovers at 3.05.
EVEN = [100] * 8
COLLAPSED = [400, 380, 20, 0, 0, 0, 0, 0]
HALF_IDLE = [200, 200, 200, 200, 0, 0, 0, 0]
# exp(entropy) 2.8, and three of eight idle.
BETWEEN = [390, 360, 20, 15, 15, 0, 0, 0]


def watch_steps(watch: RouterWatch, *layers: Sequence[int], steps: int = COLLAPSE_STEPS) -> tuple[int, ...] | None:
    """Show steps with this load of layers 1, 2... and return the collapsed layers after these."""
    for _ in range(steps):
        watch.note_step(ExpertCounts(tuple(range(1, len(layers) + 1)), np.array(layers), per_token=2))
    return watch.collapsed_layers


@pytest.mark.parametrize(
    ("load", "is_collapsed"),
    [
        pytest.param(EVEN, False, id="even"),
        pytest.param(COLLAPSED, True, id="two experts do nearly all"),
        pytest.param(HALF_IDLE, True, id="half of the experts are dead"),
        pytest.param(BETWEEN, False, id="between both borders"),
        pytest.param([4, 4, 4, 4, 0, 0, 0, 0], False, id="too few tokens for any to be dead"),
        pytest.param([0] * 8, False, id="no token at all"),
    ],
)
def test_a_layer_collapses_by_its_load(load: list[int], is_collapsed: bool) -> None:
    assert watch_steps(RouterWatch(), EVEN, load) == ((2,) if is_collapsed else ())


def test_nothing_is_known_before_there_are_enough_steps() -> None:
    watch = RouterWatch()
    assert watch_steps(watch, COLLAPSED, steps=COLLAPSE_STEPS - 1) is None
    assert watch_steps(watch, COLLAPSED, steps=1) == (1,)


def test_single_steps_change_nothing() -> None:
    watch = RouterWatch()
    for _ in range(3):
        assert watch_steps(watch, COLLAPSED, steps=COLLAPSE_STEPS - 1) in (None, ())
        assert watch_steps(watch, EVEN, steps=1) == ()
    assert watch_steps(watch, COLLAPSED) == (1,)
    for _ in range(3):
        assert watch_steps(watch, EVEN, steps=COLLAPSE_STEPS - 1) == (1,)
        assert watch_steps(watch, COLLAPSED, steps=1) == (1,)
    assert watch_steps(watch, EVEN) == ()


def test_a_load_between_the_borders_keeps_the_state() -> None:
    watch = RouterWatch()
    assert watch_steps(watch, BETWEEN, COLLAPSED) == (2,)
    assert watch_steps(watch, BETWEEN, BETWEEN, steps=50) == (2,)
    assert watch_steps(watch, BETWEEN, EVEN) == ()


def test_where_each_token_takes_all_experts_none_can_collapse() -> None:
    watch = RouterWatch()
    for _ in range(COLLAPSE_STEPS):
        watch.note_step(ExpertCounts((0,), np.array([[100, 100]]), per_token=2))
    assert watch.collapsed_layers == ()


def test_each_change_is_logged_once_with_its_layers(caplog: pytest.LogCaptureFixture) -> None:
    log = RouterLog()
    for step, layers in enumerate((None, (), (3,), (3,), (3, 4, 5), (4, 5), ()), 1):
        log.note_layers(step, layers)
    assert [message.partition(":")[0] + message.partition(":")[2][:34] for message in caplog.messages] == [
        "step 3 the router of layer 3 collapsed: f"[:40],
        "step 5 the routers of layers 4, 5 collap"[:40],
        "step 6 layer 3 recovered: tokens spread ",
        "step 7 layers 4, 5 recovered: tokens spr",
    ]
