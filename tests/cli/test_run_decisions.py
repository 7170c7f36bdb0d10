"""What `moejob run` decides and shows, without a process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from builders import spec
from moejob_api.contract import LastWord, Outcome, PodProgress, RankBeat, RunProgress
from moejob_api.layout.sizes import layout
from moejob_api.restarts import Budget, GiveUp, ReplaceGang, ReplacePods, RestartRanks
from moejob_cli.running.display import View, duration, is_news, plain_line
from moejob_cli.running.launchers import Ports, RunOf, launcher_order
from moejob_cli.running.machine import CannotRun, Machine, must_fit, trainer_python, visible_gpus
from moejob_cli.running.recovery import Memory, PodSeen, answered, looked
from moejob_cli.running.steps import StepLine, StepLog, seconds_left, sparkline, tokens_per_second

DEADLINE = 100


def pod(index: int, *, age: float = 0.0, restarts: int = 0, saved: int | None = None, ready: bool = True) -> PodSeen:
    """A launcher that runs, with one rank."""
    heard = PodProgress(
        attempt=1,
        index=index,
        restarts=restarts,
        ready=ready,
        ranks=(RankBeat(rank=index, pid=1, step=1, age_seconds=age),),
        run=RunProgress(step=1, last_checkpoint_step=saved) if index == 0 else None,
    )
    return PodSeen(index, heard=heard, seconds=1000.0)


def ended(index: int, code: int = 1, outcome: Outcome = Outcome.RANK_FAILED) -> PodSeen:
    return PodSeen(index, exit_code=code, word=LastWord(outcome=outcome, message="boom"))


def stopped(index: int) -> PodSeen:
    return ended(index, 143, Outcome.PREEMPTED)


def memory(nodes: int = 3, **changes: object) -> Memory:
    return replace(Memory(Budget(6), nodes), **changes)  # type: ignore[arg-type]


# --- recovery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pods", "known", "decision"),
    [
        pytest.param((pod(0), pod(1), pod(2)), memory(), None, id="all well"),
        pytest.param((pod(0), ended(1), pod(2)), memory(), ReplacePods, id="a launcher ended"),
        pytest.param((ended(0), pod(1), pod(2)), memory(), ReplaceGang, id="pod 0 ended"),
        pytest.param((pod(0), ended(1, 0), ended(2)), memory(), ReplaceGang, id="another is done already"),
        pytest.param((pod(0), ended(1, 78), pod(2)), memory(), GiveUp, id="bad configuration"),
        pytest.param((pod(0), ended(1), pod(2)), memory(budget=Budget(2, spent=2)), GiveUp, id="budget spent"),
        pytest.param((pod(0), stopped(1), stopped(2)), memory(), None, id="taken away, and the others still save"),
        pytest.param((stopped(0), stopped(1), stopped(2)), memory(), ReplaceGang, id="taken away, and all have saved"),
        pytest.param((pod(0), stopped(1), ended(2)), memory(), ReplacePods, id="taken away, and another failed"),
        pytest.param(
            (stopped(0), stopped(1)), memory(2, budget=Budget(0)), ReplaceGang, id="being taken away costs nothing"
        ),
        pytest.param((pod(0, restarts=1), pod(1), pod(2)), memory(rank_restarts=0), RestartRanks, id="ranks restarted"),
        pytest.param((pod(0, restarts=1), pod(1), pod(2)), memory(), None, id="restarts of a gang not yet known"),
        pytest.param((pod(0), pod(1, age=131), pod(2)), memory(rank_restarts=0), ReplacePods, id="a silent rank"),
        pytest.param((pod(0), pod(1, age=120), pod(2)), memory(), None, id="silent, and its launcher's to restart"),
        pytest.param((pod(0), pod(1, age=131)), memory(), None, id="silent while a launcher is missing"),
    ],
)
def test_the_rung(pods: tuple[PodSeen, ...], known: Memory, decision: type | None) -> None:
    found, _ = answered(pods, known, DEADLINE)
    assert type(found) is (decision or type(None))


def test_silent_ranks_are_named() -> None:
    found, _ = answered((pod(0), pod(1, age=500), pod(2)), memory(), DEADLINE)
    assert isinstance(found, ReplacePods)
    assert "rank 1 silent" in found.reason


def test_a_launcher_that_answers_nothing_is_replaced() -> None:
    mute = PodSeen(1, seconds=500.0, quiet_seconds=500.0)
    found, _ = answered((pod(0), mute, pod(2)), memory(), DEADLINE)
    assert isinstance(found, ReplacePods)
    assert "no rank has been heard" in found.reason


def test_launchers_that_fail_together_are_charged_once() -> None:
    _, after = answered((pod(0), ended(1), ended(2)), memory(), DEADLINE)
    assert after.budget.spent == 1
    assert after.replacing == {1, 2}


def test_a_peer_that_does_not_survive_a_replacement_costs_nothing() -> None:
    found, after = answered((pod(0), ended(2)), memory(replacing=frozenset({1}), budget=Budget(6, spent=1)), DEADLINE)
    assert isinstance(found, ReplacePods)
    assert found.pods == (2,)
    assert after.budget.spent == 1
    assert after.replacing == {1, 2}


def test_a_replaced_launcher_that_fails_again_is_charged_again() -> None:
    known = memory(replacing=frozenset({1}), budget=Budget(6, spent=1))
    _, after = answered((pod(0), ended(1), pod(2)), known, DEADLINE)
    assert after.budget.spent == 2


def test_a_replacement_is_over_when_every_rank_is_heard_again() -> None:
    known = memory(replacing=frozenset({1}))
    assert looked((pod(0), pod(1, ready=False), pod(2)), known).replacing
    assert looked((pod(0), pod(2)), known).replacing
    assert not looked((pod(0), pod(1), pod(2)), known).replacing


@pytest.mark.parametrize(
    ("before", "saved", "spent"),
    [
        pytest.param(None, 4, 0, id="the first checkpoint"),
        pytest.param(4, 8, 0, id="a newer one"),
        pytest.param(4, 4, 3, id="the same"),
        pytest.param(8, 4, 3, id="an older one, the newest was damaged"),
    ],
)
def test_a_newer_checkpoint_renews_the_budget(before: int | None, saved: int, spent: int) -> None:
    known = memory(nodes=1, checkpoint_step=before, budget=Budget(6, spent=3))
    assert looked((pod(0, saved=saved),), known).budget.spent == spent


# --- launchers --------------------------------------------------------------------------------------------------------


def machine(**changes: object) -> Machine:
    plain = Machine(Path("/python"), ("0", "1", "2", "3"), (0, 1, 2, 3), {})
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_simulated_nodes_divide_gpus_and_cores() -> None:
    wanted = spec(parallelism={"data": 4}, resources={"gpusPerNode": 2})
    of = RunOf("job", "uid", wanted, layout(wanted.parallelism, 2), Path("/run"))
    orders = [launcher_order(of, machine(), Ports(1, 2), 1, index) for index in (0, 1)]
    assert [order.environment["CUDA_VISIBLE_DEVICES"] for order in orders] == ["0,1", "2,3"]
    assert [order.cores for order in orders] == [{0, 1}, {2, 3}]


@pytest.mark.parametrize(
    ("limited", "seen"),
    [(None, ("0", "1")), ("", ()), ("-1", ()), ("1", ("1",)), ("GPU-abc, 1", ("GPU-abc", "1"))],
    ids=["all", "none", "minus one", "one", "by name"],
)
def test_the_gpus_that_cuda_leaves(limited: str | None, seen: tuple[str, ...]) -> None:
    environ = {} if limited is None else {"CUDA_VISIBLE_DEVICES": limited}
    assert visible_gpus(("nvidia0", "nvidia1"), environ) == seen


def test_without_a_variable_the_trainer_of_the_checkout_is_used(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="make setup"):
        trainer_python({}, tmp_path)
    python = tmp_path / ".venv/trainer/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    assert trainer_python({}, tmp_path) == python


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        pytest.param({"method": "GRPO"}, "needs rollout engines", id="GRPO"),
        pytest.param({"lifecycle": {"suspend": True}}, "suspend is true", id="suspended"),
        pytest.param({"parallelism": {"data": 8}}, "needs 8 GPUs and 4 GPUs can be seen", id="too few GPUs"),
    ],
)
def test_what_cannot_run_here(sections: dict[str, object], said: str) -> None:
    wanted = spec(**sections)
    with pytest.raises(CannotRun, match=said):
        must_fit(wanted, layout(wanted.parallelism, wanted.resources.gpus_per_node), machine())


# --- what is shown ----------------------------------------------------------------------------------------------------


def lines(*losses: float) -> list[StepLine]:
    return [StepLine(step=step, loss=loss, seconds=0.5, tokens=100) for step, loss in enumerate(losses, start=1)]


def test_steps_that_are_done_again_replace_those_before(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    log = StepLog(file)
    log.read()
    file.write_text("".join(json.dumps({"step": step, "loss": 9.0}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "l')
    log.read()
    assert [line.step for line in log.lines] == [1, 2, 3]
    with file.open("a") as more:
        more.write('oss": 1.0}\n{"step": 2, "loss": 7.0, "evalLoss": 5.0}\n')
    log.read()
    assert [(line.step, line.loss) for line in log.lines] == [(1, 9.0), (2, 7.0)]
    assert log.lines[-1].eval_loss == 5.0


def test_a_curve_keeps_its_ends_and_its_width() -> None:
    assert sparkline([8, 1], 10) == "█▁"
    assert sparkline([3, 3], 10) == "▁▁"
    assert len(sparkline(list(range(1000)), 40)) == 40
    assert sparkline([1.0, float("nan"), 2.0], 10) == "▁█"
    assert sparkline([], 10) == ""


def test_speed_and_time_left_follow_from_the_last_steps() -> None:
    assert tokens_per_second(lines(3, 2, 1)) == 200.0
    assert seconds_left(lines(3, 2, 1), 13) == 5.0
    assert seconds_left([], 13) is None


def test_a_plain_line_says_it_all() -> None:
    view = View("training", lines(3, 2.5), 10, checkpoint_step=2, restarts=1)
    assert plain_line(view) == "training: step 2/10, loss 2.5000, 200 tokens/s, 4 s left, checkpoint 2, 1 restart"


@pytest.mark.parametrize(
    ("changes", "seconds", "is_due"),
    [
        pytest.param({}, 100.0, False, id="nothing new"),
        pytest.param({"phase": "saving"}, 0.0, True, id="another phase"),
        pytest.param({"checkpoint_step": 2}, 0.0, True, id="a checkpoint"),
        pytest.param({"lines": lines(3, 2)}, 0.0, False, id="a step at once"),
        pytest.param({"lines": lines(3, 2)}, 6.0, True, id="a step later"),
        pytest.param({"lines": lines(3, 2, 1)}, 0.0, True, id="the last step"),
    ],
)
def test_plain_lines_come_when_there_is_news(changes: dict[str, object], seconds: float, is_due: bool) -> None:
    shown = View("training", lines(3), 3, None, 0)
    assert is_news(replace(shown, **changes), shown, seconds) is is_due  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "said"), [(5, "5 s"), (65, "1 min 5 s"), (3 * 3600 + 120, "3 h 2 min")])
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
