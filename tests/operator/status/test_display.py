"""The column of steps shows the phase of long starts and ends, with its share, and writes no more than polls bring."""

from __future__ import annotations

from typing import Any

import pytest

from fake_world import World
from moejob_api.contract.pods import PodProgress, PodRole, RunPhase, phase_text
from moejob_operator.status.display import SHOWN_PHASE_SECONDS
from scenarios import GRPO

POLL_SECONDS = 31.0


def running(**sections: Any) -> World:
    world = World()
    world.apply(**sections)
    world.settle()
    world.run()
    world.settle()
    return world


def report_phase(world: World, *texts: str, seconds: float = 60.0) -> None:
    """Let each trainer pod report its phase, and the operator poll them."""
    for pod, text in zip(world.cluster.pods(PodRole.TRAINER), texts, strict=True):
        index = int(pod["metadata"]["labels"]["moejob.dev/index"])
        world.cluster.answers[pod["metadata"]["uid"]] = PodProgress(
            attempt=0, index=index, ready=True, phase=text, phase_seconds=seconds
        )
    world.wait(POLL_SECONDS)
    world.settle()


def column(world: World) -> str:
    return "" if world.status.display is None else world.status.display.step


def loading(share: float) -> str:
    return phase_text(RunPhase.RESTORING, share)


def test_a_long_load_shows_rising_percentages_and_then_the_steps() -> None:
    world = running()
    texts = []
    for share in (0.1, 0.43, 0.99):
        report_phase(world, loading(share), loading(share))
        texts.append(column(world))
    assert texts == ["Loading 10 %", "Loading 43 %", "Loading 99 %"]
    world.report_progress(3)
    world.wait(POLL_SECONDS)
    world.settle()
    assert column(world) == "3/100"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        pytest.param((loading(0.9), loading(0.2)), "Loading 20 %", id="the slower pod"),
        pytest.param((loading(0.9), phase_text(RunPhase.PREPARING_DATA)), "Preparing data", id="the earlier phase"),
        pytest.param((loading(0.9), "\x1b[2J 3 %"), "Loading 90 %", id="a stranger's words count for nothing"),
        pytest.param((loading(0.4), phase_text(RunPhase.SPARE)), "Loading 40 %", id="a spare holds up no rank"),
        pytest.param(("dancing", "singing"), "", id="no words that there are"),
        pytest.param((phase_text(RunPhase.STEPPING), phase_text(RunPhase.STEPPING)), "", id="no step is reported yet"),
    ],
)
def test_the_rank_that_is_furthest_behind_is_shown(texts: tuple[str, str], expected: str) -> None:
    world = running()
    report_phase(world, *texts)
    assert column(world) == expected


def test_every_phase_has_a_word_but_steps_and_the_wait_of_a_spare() -> None:
    for phase in RunPhase:
        world = running()
        report_phase(world, phase_text(phase), phase_text(phase))
        assert bool(column(world)) is (phase not in (RunPhase.STEPPING, RunPhase.SPARE))


@pytest.mark.parametrize("has_ready_engines", [True, False], ids=["ready engines", "an engine that starts again"])
def test_a_first_step_without_an_engine_waits_for_engines(has_ready_engines: bool) -> None:
    world = running(**GRPO)
    if not has_ready_engines:
        world.start_engine_again(0, 4, "RuntimeError: no kernel for this GPU")
    report_phase(world, phase_text(RunPhase.FIRST_STEP), phase_text(RunPhase.FIRST_STEP))
    assert column(world) == ("First step" if has_ready_engines else "Waiting for engines")
    why = world.status.why
    assert (why is None) is has_ready_engines
    if why is not None:
        assert why.message == "engine 0 has ended 4 times: RuntimeError: no kernel for this GPU"


def test_a_colocated_engine_that_ends_again_and_again_is_named() -> None:
    world = running()
    text = "waiting for engines: engine 1 has ended 4 times"
    report_phase(world, phase_text(RunPhase.FIRST_STEP), text)
    assert column(world) == "Waiting for engines"
    assert world.status.why is not None
    assert world.status.why.message == "engine 1 has ended 4 times"


def test_the_share_of_engines_that_have_started_is_shown() -> None:
    world = running()
    text = phase_text(RunPhase.AWAITING_ENGINES, 0.5)
    report_phase(world, text, text)
    assert column(world) == "Waiting for engines 50 %"


def test_a_short_phase_is_not_written() -> None:
    world = running()
    before = world.status
    report_phase(world, loading(0.1), loading(0.1), seconds=SHOWN_PHASE_SECONDS - 1.0)
    assert world.status == before


def test_a_load_writes_once_for_each_poll_at_most() -> None:
    world = running()
    for number in range(5):
        report_phase(world, loading(0.1 + number / 100), loading(0.1 + number / 100))
        version = world.job["metadata"]["resourceVersion"]
        for pod in world.cluster.pods(PodRole.TRAINER):
            world.cluster.answers[pod["metadata"]["uid"]] = PodProgress(
                attempt=0, index=0, phase=loading(0.9), phase_seconds=99.0
            )
        # Reconciles before the next poll find nothing to write.
        for _ in range(10):
            world.wait(0.1)
            world.reconcile()
        assert world.job["metadata"]["resourceVersion"] == version


def test_a_load_that_ends_in_a_restart_is_not_shown_any_more() -> None:
    world = running()
    report_phase(world, loading(0.1), loading(0.1))
    assert column(world) == "Loading 10 %"
    world.end_all_pods(1)
    world.settle()
    assert world.status.phase == "Restarting"
    assert column(world) == ""
