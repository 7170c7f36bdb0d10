"""Whole runs of GRPO beside one real engine that gets its weights by broadcast."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engines import PYTHON, ROOT, Engine
from moejob_api.contract.pods import ExitCode, HttpPath
from moejob_trainer.checkpoint_export.run import read_stored_run
from moejob_trainer.checkpoint_export.run_export import ExportOptions, export_run
from moejob_trainer.checkpoints.manifest import EvaluationFacts, read_manifest
from moejob_trainer.data import tiny
from trainer.rollouts.beside import STEPS, Beside, Launched, lay_out
from trainer.rollouts.own_words import greedy
from trainer.runs import LONGEST_SECONDS, StartedRanks, await_result
from trainer.worlds import Worlds

pytestmark = pytest.mark.slow

EXACT, CLOSE = 1e-5, 1e-4
GREEDY = ROOT / "tests/rollout/greedy.py"
QUESTIONS = ("count from 2 to 5", "what is the colour of grass", "say good morning", "4 + 3")
TOKENS = 12


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    folder = tmp_path_factory.mktemp("engine")
    lay_out(folder / "engine-model")
    made = Beside(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(beside: Beside) -> Path:
    """The folder of a run of one rank that nothing is done to."""
    return beside.run_to_end("undisturbed").folder


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    """The last line of each step in the step log."""
    return {line["step"]: line for line in map(json.loads, (folder / "steps.jsonl").read_text().splitlines())}


def assert_like(folder: Path, expected: Path) -> None:
    """Every answer, its rewards and its advantage are those of the other run, and so are losses."""
    ours, theirs = lines(folder), lines(expected)
    assert {*ours} == {*theirs} == {*range(1, STEPS + 1)}
    for step in theirs:
        answers, others = ((one / f"samples/step-{step}.jsonl").read_text() for one in (folder, expected))
        assert answers == others
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], abs=EXACT)
        assert ours[step]["mismatchMean"] < CLOSE


def break_off(
    beside: Beside, run: StartedRanks | Launched, sender: Callable[[], int], kill: Callable[[], None]
) -> None:
    """Stop the rank that sends weights inside the broadcast of step 3, kill, and await the engine out of it."""
    passage = beside.passage
    stands_still, samples = threading.Event(), run.folder / "samples/step-2.jsonl"

    def hold() -> None:
        # The engine gets the request all the same, and waits for what never comes.
        if samples.exists() and not stands_still.is_set():
            os.kill(sender(), signal.SIGSTOP)
            # Its threads stop one by one, and any of them could still send.
            await_result(lambda: is_stopped(sender()), "the sender at a standstill")
            stands_still.set()

    refused = passage.refused["/update_weights"]
    passage.arrivals["/update_weights"] = hold
    try:
        await_result(lambda: stands_still.is_set() or not run.is_running(), "the weights of step 3")
        assert run.is_running(), run.read_log()
        await_result(lambda: unread(sender(), beside.engine), "the engine in the broadcast")
        kill()
        await_result(lambda: passage.refused["/update_weights"] > refused, "the engine out of the broadcast")
    except AssertionError as late:
        raise AssertionError(
            f"{late}; the run said:\n{run.read_log()}\nthe engine said:\n{beside.read_log()}"
        ) from late
    finally:
        del passage.arrivals["/update_weights"]


@pytest.mark.thorough
def test_a_trainer_that_is_killed_inside_a_broadcast_brings_the_engine_to_its_next_weights(
    beside: Beside, undisturbed: Path
) -> None:
    run = beside.start("killed")
    (trainer,) = run.processes
    break_off(beside, run, lambda: trainer.pid or 0, run.kill)
    again = beside.run_to_end("killed", 2)
    assert {line["attempt"] for step, line in lines(again.folder).items() if step > 2} == {2}
    assert_like(again.folder, undisturbed)
    # The weights of the last step are those of the three updates before it.
    assert str(beside.engine.get("/weight_info").body["weight_version"]).startswith(f"{STEPS - 1}.")


@pytest.mark.thorough
def test_ranks_that_lose_one_of_them_inside_a_broadcast_start_again_and_learn_the_same(
    beside: Beside, undisturbed: Path
) -> None:
    run = beside.launch("halved", parallelism={"tensor": 2}, resources={"gpusPerNode": 2})
    break_off(beside, run, lambda: run.ranks()[0], lambda: os.kill(run.ranks()[1], signal.SIGKILL))
    assert run.process.wait(LONGEST_SECONDS) == 0, run.read_log()
    told = lines(run.folder)
    assert {line["attempt"] for line in told.values()} == {1}
    # Step 2 is done again where its checkpoint was not complete.
    assert told[1]["restart"] == 0
    assert {line["restart"] for step, line in told.items() if step > 2} == {1}
    assert_like(run.folder, undisturbed)


# Two minutes in which the trainer waits for an engine.
@pytest.mark.thorough
def test_the_only_engine_that_hangs_while_it_generates_is_asked_again_when_it_wakes(
    beside: Beside, undisturbed: Path
) -> None:
    passage, samples = beside.passage, beside.runs.volume / "frozen/samples/step-1.jsonl"
    lock, asked, looks = threading.Lock(), count(1), count()
    is_frozen, given_up = threading.Event(), threading.Event()

    def freeze() -> None:
        # In step 2, when one of the answers may be there.
        with lock:
            if samples.exists() and next(asked) == 2:
                os.killpg(beside.engine.pid, signal.SIGSTOP)
                is_frozen.set()

    def look() -> None:
        # The second comes when the first has not been answered for long.
        if is_frozen.is_set() and next(looks) == 1:
            given_up.set()

    passage.arrivals |= {HttpPath.ANSWER: freeze, "/weight_info": look}
    run = beside.start("frozen")
    try:
        await_result(lambda: given_up.is_set() or not run.is_running(), "the end of the trainer's patience")
        assert run.is_running(), run.read_log()
    finally:
        os.killpg(beside.engine.pid, signal.SIGCONT)
        passage.arrivals.clear()
    assert run.await_exit_codes() == [0], run.read_log()
    assert f"{passage.url}/weight_info has not answered in 120 s; it gets no work" in run.read_log()
    assert f"engine {passage.url} serves again" in run.read_log()
    assert_like(run.folder, undisturbed)


@pytest.mark.thorough
def test_the_only_engine_that_is_killed_while_it_generates_gets_the_weights_again(
    beside: Beside, undisturbed: Path
) -> None:
    passage, samples = beside.passage, beside.runs.volume / "bereft/samples/step-1.jsonl"
    lock, asked = threading.Lock(), count(1)

    def kill() -> None:
        # In step 2, when one of the answers may be there.
        with lock:
            if samples.exists() and next(asked) == 2:
                beside.replace_engine()

    passage.arrivals[HttpPath.ANSWER] = kill
    try:
        run = beside.run_to_end("bereft", parallelism={"tensor": 2})
    finally:
        del passage.arrivals[HttpPath.ANSWER]
    assert run.read_log().count("no engine has the weights of step 1 any more; they are given to them again") == 1
    assert [line["step"] for line in map(json.loads, (run.folder / "steps.jsonl").read_text().splitlines())] == [
        *range(1, STEPS + 1)
    ]
    assert_like(run.folder, undisturbed)


def is_stopped(pid: int) -> bool:
    """Return whether no thread of a process runs any more."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def unread(pid: int, engine: Engine) -> bool:
    """Return whether something has come from an engine that a process, which stands still, has not read."""
    others = {row[1] for worker in engine.workers() for row in connections(worker)}
    return any(row[2] in others and int(row[4].partition(":")[2], 16) for row in connections(pid))


def connections(pid: int) -> list[list[str]]:
    """The rows of its sockets, as the kernel writes them: second and third are both ends, the fifth is what waits."""
    sockets = set()
    with suppress(OSError):
        sockets = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row for row in rows if row[3] == "01" and f"socket:[{row[9]}]" in sockets]


def test_a_run_that_is_suspended_goes_on_in_another_layout_with_the_same_answers(
    beside: Beside, undisturbed: Path
) -> None:
    run = beside.start("moved", parallelism={"tensor": 2})
    await_result(lambda: (run.folder / "samples/step-2.jsonl").exists() or not run.is_running(), "step 2")
    run.signal(signal.SIGTERM)
    for process in run.processes:
        process.join(LONGEST_SECONDS)
    assert [process.exitcode for process in run.processes] == [ExitCode.SAVED_AND_STOPPED] * 2, run.read_log()
    assert max(lines(run.folder)) in (2, 3)
    again = beside.run_to_end("moved", 2, parallelism={"expert": 2})
    told = lines(again.folder)
    assert {line["attempt"] for line in told.values()} == {1, 2}
    assert [*told] == [*range(1, STEPS + 1)]
    assert_like(again.folder, undisturbed)


@pytest.mark.thorough
def test_megatrons_models_learn_the_same_also_when_killed_and_resumed_in_another_layout(
    beside: Beside, undisturbed: Path
) -> None:
    model = {"implementation": "Megatron"}
    run = beside.start("megatron", model=model, parallelism={"tensor": 2})
    await_result(lambda: (run.folder / "samples/step-3.jsonl").exists() or not run.is_running(), "step 3")
    run.kill()
    again = beside.run_to_end("megatron", 2, model=model, parallelism={"expert": 2})
    assert {line["attempt"] for line in lines(again.folder).values()} == {1, 2}
    assert_like(again.folder, undisturbed)


def test_the_checkpoint_of_the_best_answers_is_kept_beside_the_last_and_exported(
    beside: Beside, tmp_path: Path
) -> None:
    run = beside.run_to_end(
        "best",
        data={"eval": [{"source": "moejob/tiny-sums", "format": "Prompts", "split": "test"}]},
        training={"evalEvery": 1},
        grpo={"evaluation": {"samples": 2}},
        checkpoint={"everySteps": 1000, "keep": 1, "keepBest": 1, "exportHuggingFace": True},
    )
    told = lines(run.folder)
    scores = [told[step]["evalMean@2"] for step in sorted(told)]
    best = scores.index(max(scores)) + 1
    assert [line["evalScore"] for line in told.values()] == scores
    assert (told[STEPS]["bestStep"], told[STEPS]["bestScore"]) == (best, max(scores))
    # Else the newest checkpoint would be the best one, too.
    assert best < STEPS
    found = {path.parent for path in run.folder.glob("checkpoints/*/complete.json")}
    evaluated = {path.name.partition(".")[0]: read_manifest(path).facts.evaluation for path in found}
    assert evaluated == {
        f"step-{best}": EvaluationFacts(measure="evalMean@2", value=max(scores)),
        f"step-{STEPS}": None,
    }
    exported = _tensors(run.folder / "export")
    by_step = {step: _tensors(_exported(run.folder, step, tmp_path)) for step in (best, STEPS)}
    assert [name for name, tensor in exported.items() if not torch.equal(by_step[best][name], tensor)] == []
    assert not torch.equal(by_step[STEPS]["lm_head.weight"], exported["lm_head.weight"])


def _exported(run: Path, step: int, folder: Path) -> Path:
    """Export one step of a run, as `moejob export --step` does."""
    export_run(read_stored_run(run, step), ExportOptions(folder / f"step-{step}"))
    return folder / f"step-{step}"


def test_weights_pass_from_sft_through_grpo_in_another_layout_to_vllm(
    beside: Beside, worlds: Worlds, tmp_path: Path
) -> None:
    exporting = {"everySteps": 1000, "exportHuggingFace": True}
    teaching: dict[str, Any] = {"training": {"maxSteps": 40, "globalBatchSize": 8}, "data": {"maxLength": 256}}
    taught = beside.runs.run_to_end("taught", **teaching, checkpoint=exporting, parallelism={"tensor": 2})
    run = beside.run_to_end("handed-on", checkpoint=exporting | {"resumeFrom": "taught"}, parallelism={"expert": 2})
    before, after = (_tensors(one.folder / "export") for one in (taught, run))
    # GRPO freezes the router.
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert routers
    assert all(torch.equal(before[name], after[name]) for name in routers)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    (checkpoint,) = (path.parent for path in run.folder.glob(f"checkpoints/step-{STEPS}.*/complete.json"))
    shutil.copytree(run.folder / "export", tmp_path / "first", ignore=shutil.ignore_patterns("*.safetensors"))
    prompts = _prompts()
    (own,) = worlds.run(1, greedy, tmp_path, checkpoint, prompts, TOKENS)
    # It has something to say: one word over and over would be easy to say again.
    assert len({*np.array(own).flatten().tolist()}) > 8
    assert said_by_vllm(run.folder / "export", prompts) == own


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _prompts() -> list[list[int]]:
    tokenizer: Any = tiny.build_tokenizer()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def said_by_vllm(export: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return what plain vLLM answers greedily, in a process of its own."""
    done = subprocess.run(
        [PYTHON, GREEDY, export, json.dumps(prompts), str(TOKENS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * LONGEST_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers
