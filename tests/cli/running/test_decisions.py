"""Decisions and display of `moejob run`, without a process."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from builders import spec
from moejob_api.contract.pods import (
    PodOutcome,
    PodProgress,
    ReportedHeartbeat,
    RunPhase,
    RunProgress,
    TerminationMessage,
)
from moejob_api.layout.sizes import derive_layout
from moejob_api.recovery.restarts import GiveUp, ReplaceGang, ReplacePods, RestartBudget, RestartRanks
from moejob_api.recovery.state import Recovery, RecoveryState
from moejob_cli.running.display import RunView, closing_lines, draw_view, duration_words, is_news, plain_line
from moejob_cli.running.launchers import LauncherPorts, LocalRun, engine_orders, launcher_order
from moejob_cli.running.machine import CannotRun, LocalMachine, require_capacity, trainer_python, visible_gpus
from moejob_cli.running.recovery import PodReport, choose_recovery, state_after_poll
from moejob_cli.running.steps import StepLine, StepLog, seconds_left, tokens_per_second
from moejob_cli.running.supervision import current_phase
from moejob_cli.sparklines import draw_sparkline

DEADLINE = 100


def pod(index: int, *, age: float = 0.0, restarts: int = 0, saved: int | None = None, ready: bool = True) -> PodReport:
    """A launcher that runs, with one rank."""
    progress = PodProgress(
        attempt=1,
        index=index,
        restarts=restarts,
        ready=ready,
        ranks=(ReportedHeartbeat(rank=index, pid=1, step=1, age_seconds=age),),
        run=RunProgress(step=1, last_checkpoint_step=saved) if index == 0 else None,
    )
    return PodReport(index, progress=progress, seconds=1000.0)


def ended(index: int, code: int = 1, outcome: PodOutcome = PodOutcome.RANK_FAILED) -> PodReport:
    return PodReport(index, exit_code=code, termination_message=TerminationMessage(outcome=outcome, message="boom"))


def stopped(index: int) -> PodReport:
    return ended(index, 143, PodOutcome.PREEMPTED)


def state(**changes: object) -> RecoveryState:
    return replace(RecoveryState(RestartBudget(6)), **changes)  # type: ignore[arg-type]


def after_failures(known: RecoveryState, *pods: PodReport) -> Recovery:
    found = choose_recovery(pods, 3, known, DEADLINE)
    assert found is not None
    return found


# --- recovery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pods", "known", "decision"),
    [
        pytest.param((pod(0), pod(1), pod(2)), state(), None, id="all well"),
        pytest.param((pod(0), ended(1), pod(2)), state(), ReplacePods, id="a launcher ended"),
        pytest.param((ended(0), pod(1), pod(2)), state(), ReplacePods, id="pod 0 ended"),
        pytest.param((pod(0), ended(1, 0), ended(2)), state(), ReplaceGang, id="another is done already"),
        pytest.param((pod(0), ended(1, 78), pod(2)), state(), GiveUp, id="bad configuration"),
        pytest.param((pod(0), ended(1), pod(2)), state(budget=RestartBudget(2, spent=2)), GiveUp, id="budget spent"),
        pytest.param((pod(0), stopped(1), stopped(2)), state(), None, id="taken away, and the others still save"),
        pytest.param((stopped(0), pod(1, ready=False), pod(2, ready=False)), state(), ReplacePods, id="one taken away"),
        pytest.param((stopped(0), stopped(1), stopped(2)), state(), ReplaceGang, id="taken away, and all have saved"),
        pytest.param((pod(0), stopped(1), ended(2)), state(), ReplacePods, id="taken away, and another failed"),
        pytest.param(
            (stopped(0), stopped(1)), state(budget=RestartBudget(0)), ReplacePods, id="being taken away costs nothing"
        ),
        pytest.param((pod(0, restarts=1), pod(1), pod(2)), state(), RestartRanks, id="ranks restarted"),
        pytest.param(
            (pod(0, restarts=1), pod(1), pod(2)),
            state(rank_restarts=None),
            None,
            id="ranks restarted beside a replaced launcher",
        ),
        pytest.param((pod(0), pod(1, age=131), pod(2)), state(), ReplacePods, id="a silent rank"),
        pytest.param((pod(0), pod(1, age=120), pod(2)), state(), None, id="silent, and its launcher's to restart"),
        pytest.param((pod(0), pod(1, age=131)), state(), None, id="silent while a launcher is missing"),
    ],
)
def test_the_rung(pods: tuple[PodReport, ...], known: RecoveryState, decision: type | None) -> None:
    found = choose_recovery(pods, 3, known, DEADLINE)
    assert type(None if found is None else found.action) is (decision or type(None))


def test_silent_ranks_are_named() -> None:
    found = after_failures(state(), pod(0), pod(1, age=500), pod(2)).action
    assert isinstance(found, ReplacePods)
    assert "rank 1 silent" in found.reason


def test_a_launcher_that_answers_nothing_is_replaced() -> None:
    mute = PodReport(1, seconds=500.0, quiet_seconds=500.0)
    found = after_failures(state(), pod(0), mute, pod(2)).action
    assert isinstance(found, ReplacePods)
    assert "no rank has been heard" in found.reason


def test_launchers_that_fail_together_are_charged_once() -> None:
    after = after_failures(state(), pod(0), ended(1), ended(2)).state
    assert after.budget.spent == 1
    assert after.replacing == {1, 2}


def test_a_peer_that_does_not_survive_a_replacement_costs_nothing() -> None:
    found = after_failures(state(replacing=frozenset({1}), budget=RestartBudget(6, spent=1)), pod(0), ended(2))
    after = found.state
    assert isinstance(found.action, ReplacePods)
    assert found.action.pods == (2,)
    assert after.budget.spent == 1
    assert after.replacing == {1, 2}


def test_a_replaced_launcher_that_fails_again_is_charged_again() -> None:
    known = state(replacing=frozenset({1}), budget=RestartBudget(6, spent=1))
    after = after_failures(known, pod(0), ended(1), pod(2)).state
    assert after.budget.spent == 2


def test_a_replacement_is_over_when_every_rank_is_heard_again() -> None:
    known = state(replacing=frozenset({1}))
    assert state_after_poll((pod(0), pod(1, ready=False), pod(2)), 3, known).replacing
    assert state_after_poll((pod(0), pod(2)), 3, known).replacing
    assert not state_after_poll((pod(0), pod(1), pod(2)), 3, known).replacing


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
    known = state(checkpoint_step=before, budget=RestartBudget(6, spent=3))
    assert state_after_poll((pod(0, saved=saved),), 1, known).budget.spent == spent


@given(st.lists(st.integers(0, 9) | st.none(), max_size=100), st.integers(0, 3))
def test_a_run_without_a_new_highest_checkpoint_gives_up_after_backoff_limit_restarts(
    history: list[int | None], limit: int
) -> None:
    """None is a launcher that ends; a number is the newest checkpoint that can be read."""
    known, highest, restarts = state(budget=RestartBudget(limit)), -1, 0
    for saved in history:
        pods = (pod(0, saved=saved), pod(1)) if saved is not None else (pod(0), ended(1))
        known = state_after_poll(pods, 2, known)
        if saved is not None and saved > highest:
            highest, restarts = saved, 0
        after = choose_recovery(pods, 2, known, DEADLINE)
        if after is None:
            continue
        if isinstance(after.action, GiveUp):
            assert restarts == limit
            return
        known, restarts = after.state, restarts + 1
        assert known.budget.spent == restarts <= limit


# --- launchers --------------------------------------------------------------------------------------------------------


def machine(**changes: object) -> LocalMachine:
    plain = LocalMachine(Path("/python"), ("0", "1", "2", "3"), (0, 1, 2, 3), {})
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_simulated_nodes_divide_gpus_and_cores() -> None:
    wanted = spec(parallelism={"data": 4}, resources={"gpusPerNode": 2})
    of = LocalRun("job", "uid", wanted, derive_layout(wanted.parallelism, 2), Path("/run"), "secret")
    orders = [launcher_order(of, machine(), LauncherPorts(1, 2), 1, index) for index in (0, 1)]
    assert [order.environment["CUDA_VISIBLE_DEVICES"] for order in orders] == ["0,1", "2,3"]
    assert [order.cores for order in orders] == [{0, 1}, {2, 3}]


@pytest.mark.parametrize(
    ("sections", "ranks", "urls", "separate"),
    [
        pytest.param({"placement": "Colocated"}, 2, ["127.0.0.1:8", "127.0.0.2:8"], 0, id="one beside ranks on cores"),
        pytest.param({"placement": "Separate"}, 2, ["127.0.0.1:8"], 1, id="one of its own"),
        pytest.param({"placement": "Separate", "replicas": 2}, 2, ["127.0.0.1:8", "127.0.0.1:9"], 2, id="two"),
    ],
)
def test_every_process_knows_all_engines(
    sections: dict[str, object], ranks: int, urls: list[str], separate: int
) -> None:
    wanted = spec(method="GRPO", parallelism={"data": 4}, resources={"accelerator": "CPU"}, grpo={"rollout": sections})
    of = LocalRun("job", "uid", wanted, derive_layout(wanted.parallelism, ranks), Path("/run"), "secret")
    ports, here = LauncherPorts(1, 2, rollout=8), machine(rollout_python=Path("/rollout"))
    engines = engine_orders(of, here, ports)
    launchers = [launcher_order(of, here, ports, 1, index) for index in (0, 1)]
    assert [order.environment["MOEJOB_INDEX"] for order in engines] == [str(index) for index in range(separate)]
    assert {order.environment["MOEJOB_ROLE"] for order in engines} <= {"rollout"}
    for environment in [order.environment for order in engines] + [order.environment for order in launchers]:
        assert environment["MOEJOB_ROLLOUT_URLS"].split(",") == [f"http://{url}" for url in urls]
        assert environment["MOEJOB_ROLLOUT_PYTHON"] == "/rollout"
        assert environment["MOEJOB_SECRET"] == "secret", "an engine without one answers all users of the machine"


def test_ranks_and_engines_listen_on_loopback_whatever_interface_shell_and_job_name() -> None:
    named = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth", "VLLM_HOST_IP": "192.0.2.2"}
    wanted = spec(
        method="GRPO",
        parallelism={"data": 4},
        resources={"accelerator": "CPU", "env": [{"name": name, "value": value} for name, value in named.items()]},
        grpo={"rollout": {"placement": "Separate"}},
    )
    of = LocalRun("job", "uid", wanted, derive_layout(wanted.parallelism, 2), Path("/run"), "secret")
    here = machine(environment=named, rollout_python=Path("/rollout"))
    environments = [order.environment for order in engine_orders(of, here, LauncherPorts(1, 2, rollout=8))]
    environments.append(launcher_order(of, here, LauncherPorts(1, 2, rollout=8), 1, 1).environment)
    for environment in environments:
        assert [environment[name] for name in named] == ["lo", "=lo", "127.0.0.1"]


def test_separate_engines_get_the_gpus_behind_those_of_the_trainer() -> None:
    wanted = spec(
        method="GRPO",
        parallelism={"data": 2},
        resources={"gpusPerNode": 2},
        grpo={"rollout": {"placement": "Separate", "replicas": 2}},
    )
    of = LocalRun("job", "uid", wanted, derive_layout(wanted.parallelism, 2), Path("/run"), "secret")
    orders = engine_orders(of, machine(), LauncherPorts(1, 2, rollout=8))
    assert [order.environment["CUDA_VISIBLE_DEVICES"] for order in orders] == ["2", "3"]


@pytest.mark.parametrize(
    ("limited", "seen"),
    [(None, ("0", "1")), ("", ()), ("-1", ()), ("1", ("1",)), ("GPU-abc, 1", ("GPU-abc", "1"))],
    ids=["all", "none", "minus one", "one", "by name"],
)
def test_the_gpus_that_cuda_leaves(limited: str | None, seen: tuple[str, ...]) -> None:
    environ = {} if limited is None else {"CUDA_VISIBLE_DEVICES": limited}
    assert visible_gpus(("nvidia0", "nvidia1"), environ) == seen


def test_without_a_variable_the_trainer_of_the_checkout_is_used(tmp_path: Path) -> None:
    environ = {"MOEJOB_CACHE": str(tmp_path)}
    with pytest.raises(CannotRun, match="make setup"):
        trainer_python(environ, tmp_path)
    python = tmp_path / ".venv/trainer/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    assert trainer_python(environ, tmp_path) == python


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
        require_capacity(wanted, derive_layout(wanted.parallelism, wanted.resources.gpus_per_node), machine())


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


def test_a_step_that_has_lost_a_number_is_shown(tmp_path: Path) -> None:
    """The log has null where a number is not finite: of a step whose loss is none, or of which no group is left."""
    file = tmp_path / "steps.jsonl"
    file.write_text('{"step": 1, "loss": null, "reward": null, "groups": 0.0, "truncated": null}\n')
    log = StepLog(file)
    log.read()
    assert [line.step for line in log.lines] == [1]
    assert "step 1/10, loss nan" in plain_line(RunView("training", log.lines, 10, checkpoint_step=None, restarts=0))


def test_a_curve_keeps_its_ends_and_its_width() -> None:
    assert draw_sparkline([8, 1], 10) == "█▁"
    assert draw_sparkline([3, 3], 10) == "▁▁"
    assert len(draw_sparkline(list(range(1000)), 40)) == 40
    assert draw_sparkline([1.0, float("nan"), 2.0], 10) == "▁█"
    assert draw_sparkline([], 10) == ""


def test_speed_and_time_left_follow_from_the_last_steps() -> None:
    assert tokens_per_second(lines(3, 2, 1)) == 200.0
    assert seconds_left(lines(3, 2, 1), 13) == 5.0
    assert seconds_left([], 13) is None


def test_the_reward_is_shown_where_there_is_one() -> None:
    learned = [
        line.model_copy(update={"reward": reward}) for line, reward in zip(lines(0.1, 0.2), (0.5, 1.0), strict=True)
    ]
    assert "reward 1.0000" in plain_line(RunView("training", learned, 10, checkpoint_step=None, restarts=0))
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(closing_lines(learned, Path("nowhere")))
    assert "reward       0.5000 ▁█ 1.0000" in captured.get()


def test_a_start_says_what_it_does_and_for_how_long() -> None:
    view = RunView("starting", [], 10, None, 0, doing="preparing the data", doing_seconds=75.0)
    assert plain_line(view) == "starting: step 0/10, preparing the data for 1 min 15 s"
    assert is_news(replace(view, doing="building the model", doing_seconds=0.0), view, 0.0)
    later = replace(view, doing_seconds=76.0)
    assert (is_news(later, view, 1.0), is_news(later, view, 10.0)) == (False, True)


def test_a_long_phase_shows_its_share_in_a_line_every_ten_seconds() -> None:
    view = RunView("starting", [], 10, None, 0, "loading and checking weights", 75.0, doing_percentage=43)
    assert plain_line(view) == "starting: step 0/10, loading and checking weights 43 % for 1 min 15 s"
    later = replace(view, doing_percentage=44)
    assert (is_news(later, view, 9.0), is_news(later, view, 10.0)) == (False, True)
    console = Console(width=120, file=io.StringIO(), force_terminal=True)
    with console.capture() as captured:
        console.print(draw_view(view))
    assert "43 %" in captured.get().splitlines()[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("loading and checking weights: 43 %", (RunPhase.RESTORING, 43, 7.5), id="a share"),
        pytest.param("building the model", (RunPhase.BUILDING, None, 7.5), id="none"),
        pytest.param("stepping", (None, None, 0.0), id="steps"),
        pytest.param("\x1b[2J", (None, None, 0.0), id="a stranger's words"),
        pytest.param(
            "waiting for engines: engine 0 has ended 4 times",
            ("waiting for engines: engine 0 has ended 4 times", None, 7.5),
            id="a colocated engine",
        ),
    ],
)
def test_the_phase_of_a_pod_is_read(text: str, expected: tuple[RunPhase | None, int | None, float]) -> None:
    progress = PodProgress(attempt=1, index=0, phase=text, phase_seconds=7.5)
    pod = PodReport(0, None, None, progress, 1.0, 0.0)
    assert current_phase((pod,)) == expected


def test_a_first_step_waits_for_a_separate_engine_that_has_ended() -> None:
    ends = "engine 2 has ended once"
    for phase, expected in (
        (RunPhase.AWAITING_ENGINES, f"waiting for engines: {ends}"),
        (RunPhase.FIRST_STEP, f"waiting for engines: {ends}"),
        (RunPhase.BUILDING, "building the model"),
        (RunPhase.STEPPING, None),
    ):
        progress = PodProgress(attempt=1, index=0, phase=phase, phase_seconds=7.5)
        assert current_phase((PodReport(0, None, None, progress, 1.0, 0.0),), ends)[0] == expected


def test_the_best_evaluation_is_shown_and_that_a_run_stopped_early() -> None:
    texts = [
        '{"step": 1, "loss": 3.0, "evalLoss": 2.5, "bestStep": 1, "bestScore": 2.5}',
        '{"step": 2, "loss": 2.0, "evalLoss": 2.75, "bestStep": 1, "bestScore": 2.5, "stoppedEarly": true}',
    ]
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(closing_lines([StepLine.model_validate_json(text) for text in texts], Path("nowhere")))
    assert "evaluation   2.5000 to 2.7500" in captured.get()
    assert "best         2.5000 at step 1" in captured.get()
    assert "stopped      early at step 2" in captured.get()


def test_a_plain_line_says_it_all() -> None:
    view = RunView("training", lines(3, 2.5), 10, checkpoint_step=2, restarts=1)
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
    shown = RunView("training", lines(3), 3, None, 0)
    assert is_news(replace(shown, **changes), shown, seconds) is is_due  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "said"), [(5, "5 s"), (65, "1 min 5 s"), (3 * 3600 + 120, "3 h 2 min")])
def test_durations(seconds: float, said: str) -> None:
    assert duration_words(seconds) == said
