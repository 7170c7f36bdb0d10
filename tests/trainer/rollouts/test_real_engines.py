"""A trainer's client and two real engines, each in the environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from builders import merge_sections
from engines import SECRET, Engine
from moejob_api.contract.pods import Environment, HttpPath
from moejob_api.models import catalog
from moejob_trainer.data import tiny
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetGenerator, FleetLimits
from moejob_trainer.rollouts.interface import Answer, Floats, GenerationRequest, SamplingParams, Tokens
from moejob_trainer.rollouts.publisher import ProbeTerms, Publisher
from moejob_trainer.rollouts.transports.disk import DiskTransport
from trainer.rollouts.passage import SCORES, Passage
from trainer.rollouts.recorded_groups import require_nothing_lost
from trainer.rollouts.stand_in import StandIn
from trainer.runs import LONGEST_SECONDS, Runs, StartedRanks, await_result, read_steps

# An engine that is silent for so long hangs: its server answers at once, whatever its workers do.
LIMITS = FleetLimits(start_seconds=900, silence_seconds=10, answer_seconds=900, look_seconds=0.2)
# Of the text that engines are compared on: tokens far apart.
PROBE = np.arange(48, dtype=np.int32) * 7919 % 512
SAMPLING = SamplingParams(temperature=0.8, top_p=1.0, max_new_tokens=48, stop_tokens=())


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    folder = tmp_path_factory.mktemp("run")
    make_model().config.save_pretrained(folder / "engine-model")
    job: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "data": {"maxLength": 64},
        "grpo": {"maxNewTokens": 64, "rollout": {"placement": "Separate"}},
    }
    two = Engine(folder, folder / "first.log", **job), Engine(folder, folder / "second.log", **job)
    yield two
    for one in two:
        one.kill()


def make_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    values = dict(catalog.find_config(tiny.TOKENIZER) or {})
    values.pop("model_type")
    found: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **values))
    found.float().eval()
    return found


def log_probabilities(model: PreTrainedModel, tokens: Tokens, temperature: float = 1.0) -> Floats:
    """Of each token but the first."""
    row = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        rows = torch.log_softmax(model(row).logits[0].float() / temperature, -1)[:-1]
    picked: Floats = rows.gather(1, row[0, 1:, None])[:, 0].numpy()
    return picked


def weights(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Under the names of the hub's files."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def apart(model: PreTrainedModel, answers: list[Answer]) -> float:
    """Mean |log-probability of the model - of the engine| over the tokens of answers."""
    differences = []
    for answer in answers:
        whole = np.concatenate([answer.request.prompt, answer.tokens])
        theirs = log_probabilities(model, whole, SAMPLING.temperature)[-len(answer.tokens) :]
        differences.append(np.abs(theirs - answer.log_probabilities))
    return float(np.concatenate(differences).mean())


STEPS = 4
KILLS = 20
# More than are done between kills.
KILLED_STEPS = 60
GRPO: dict[str, Any] = {
    "method": "GRPO",
    "data": {"train": [{"source": "moejob/tiny-sums", "format": "Prompts"}]},
    "training": {"maxSteps": STEPS, "globalBatchSize": 16},
    "grpo": {
        "groupSize": 4,
        "promptsPerStep": 4,
        "maxNewTokens": 8,
        "rollout": {"placement": "Separate", "sync": "Disk"},
    },
}


class Beside:
    """Runs beside one engine or both; a way between them on which tests decide what happens."""

    def __init__(self, engines: tuple[Engine, Engine], volume: Path) -> None:
        self.passages = tuple(Passage(engine.await_ready().url) for engine in engines)
        self.runs = Runs(volume)

    def start(self, job: str, attempt: int = 1, *, engines: int = 1, **more: Any) -> StartedRanks:
        """Start a run whose answers are rewarded by the service of the first passage."""
        reward = {"url": self.passages[0].url + SCORES, "timeoutSeconds": 2}
        environ: dict[str, str] = {
            Environment.ROLLOUT_URLS: ",".join(passage.url for passage in self.passages[:engines]),
            Environment.SECRET: SECRET,
            Environment.HOST: "127.0.0.1",
        }
        sections = merge_sections(GRPO, {"grpo": {"rewards": [reward]}})
        return self.runs.start(job, attempt=attempt, environ=environ, **(sections | more))

    def close(self) -> None:
        self.runs.close()
        for passage in self.passages:
            passage.close()


@pytest.fixture(scope="module")
def beside(engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    made = Beside(engines, tmp_path_factory.mktemp("volume"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(beside: Beside) -> Path:
    """The folder of a run that nothing is done to."""
    run = beside.start("undisturbed")
    assert run.await_exit_codes() == [0], run.read_log()
    return run.folder


@pytest.mark.slow
@pytest.mark.thorough
def test_a_trainer_that_is_killed_repeats_and_loses_no_group(beside: Beside, undisturbed: Path) -> None:
    (passage, _), samples = beside.passages, beside.runs.volume / "killed/samples"
    is_asked_again = threading.Event()
    full = beside.start("killed", before="small files")
    assert any(full.await_exit_codes())
    assert re.search(r"bytes free and weights of [0-9,]+ bytes do not fit", full.last_line()), full.read_log()
    # Between generation and update of step 3, then in the synchronization before step 4.
    _killed_at(passage, SCORES, samples / "step-2.jsonl", lambda: beside.start("killed", 2))
    _killed_at(passage, "/update_weights", samples / "step-3.jsonl", lambda: beside.start("killed", 3))

    def down_then_silent(number: int) -> int | None:
        if number == 2:
            is_asked_again.wait(LONGEST_SECONDS)
        elif number == 3:
            is_asked_again.set()
        return 503 if number == 1 else None

    passage.disturb(SCORES, down_then_silent)
    again = beside.start("killed", 4)
    assert again.await_exit_codes() == [0], again.read_log()
    passage.disturb(SCORES, lambda _: None)
    assert {step.step for step in read_steps(again.folder) if step.attempt == 4} <= {2, 3, 4}
    assert is_asked_again.is_set()
    assert _learned(again.folder) == _learned(undisturbed)


# Two minutes in which the trainer waits for an engine.
@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_learns_the_same_when_one_of_its_engines_hangs_until_its_end(
    engines: tuple[Engine, Engine], beside: Beside, undisturbed: Path
) -> None:
    passage, samples = beside.passages[0], beside.runs.volume / "hung/samples/step-1.jsonl"
    lock, asked = threading.Lock(), count(1)

    def hang() -> None:
        # In step 2, when one of the answers may be there.
        with lock:
            if samples.exists() and next(asked) == 2:
                os.killpg(engines[0].pid, signal.SIGSTOP)

    passage.arrivals[HttpPath.ANSWER] = hang
    try:
        run = beside.start("hung", engines=2)
        assert run.await_exit_codes() == [0], run.read_log()
    finally:
        os.killpg(engines[0].pid, signal.SIGCONT)
        del passage.arrivals[HttpPath.ANSWER]
    assert f"{passage.url}/weight_info has not answered in 120 s; it gets no work" in run.read_log()
    for step in (2, 3):
        assert f"the weights of step {step} have reached 1 of 2 engines" in run.read_log()
    assert len(read_steps(run.folder)) == STEPS
    assert _learned(run.folder) == _learned(undisturbed)


def _killed_at(passage: Passage, path: str, after: Path, start: Callable[[], StartedRanks]) -> None:
    """Kill a run once a file is there and the engine or the service has answered, before the trainer knows it."""
    reached, is_dead = threading.Event(), threading.Event()

    def held(_: int) -> None:
        if after.exists():
            reached.set()
            is_dead.wait(LONGEST_SECONDS)

    passage.disturb(path, held)
    run = start()
    await_result(lambda: reached.is_set() or not run.is_running(), f"{path} after {after.name}")
    assert run.is_running(), run.read_log()
    run.kill()
    is_dead.set()
    passage.disturb(path, lambda _: None)


def _learned(folder: Path) -> list[Any]:
    """Return answers, rewards and advantages of every step, and its loss."""
    last = {line["step"]: line for line in map(json.loads, (folder / "steps.jsonl").read_text().splitlines())}
    answers = [(folder / f"samples/step-{step}.jsonl").read_text() for step in range(1, STEPS + 1)]
    return [*answers, *(pytest.approx(last[step]["loss"], abs=1e-5) for step in range(1, STEPS + 1))]


@dataclass(frozen=True)
class Asked:
    """A fleet with weights, which is asked for 16 groups."""

    fleet: EngineFleet
    trained: PreTrainedModel

    def answers(self, disturb: Callable[[], None]) -> list[Answer]:
        """Return all answers; the first engine is disturbed once it generates."""
        generator = FleetGenerator(self.fleet)

        async def asked() -> list[Answer]:
            requests = [
                GenerationRequest(
                    group, member, np.arange(group, group + 12, dtype=np.int32), seed=100 * group + member
                )
                for group in range(16)
                for member in range(4)
            ]
            return await asyncio.gather(*(generator.generate(request, SAMPLING) for request in requests))

        def disturbed() -> None:
            await_result(lambda: self.fleet.engines[0].in_flight >= 8, "work for the first engine")
            disturb()

        disturbing = threading.Thread(target=disturbed)
        disturbing.start()
        answers = asyncio.run(asked())
        disturbing.join()
        return answers

    def are_right(self, answers: list[Answer]) -> None:
        """Check that there is one answer to each request, of the weights that were published."""
        assert [(one.request.group, one.request.member) for one in answers] == [
            (g, m) for g in range(16) for m in range(4)
        ]
        assert {version for one in answers for version in one.versions.tolist()} == {1}
        assert apart(self.trained, answers) < 1e-4


@pytest.fixture
def asked(engines: tuple[Engine, Engine], tmp_path: Path) -> Iterator[Asked]:
    fleet = EngineFleet([engine.url for engine in engines], EngineConnection(SECRET), LIMITS)
    trained = make_model(5)
    trial = ProbeTerms(PROBE, lambda tokens: log_probabilities(trained, tokens), lambda: 1e-3)
    publisher = Publisher(
        fleet=fleet,
        world=None,
        transport=DiskTransport(tmp_path / "weights", None, LIMITS.start_seconds),
        probe_terms=trial,
    )
    try:
        assert publisher.publish(1, iter(weights(trained, tmp_path / "first").items())).probe_mean < 1e-4
        yield Asked(fleet, trained)
    finally:
        publisher.close()


def test_an_update_that_a_killed_trainer_has_begun_is_ended_by_the_next_trainer(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    fleet = EngineFleet([engines[0].await_ready().url], EngineConnection(SECRET), LIMITS)
    trained = make_model(7)
    trial = ProbeTerms(PROBE, lambda tokens: log_probabilities(trained, tokens), lambda: 1e-3)
    publisher = Publisher(
        fleet=fleet,
        world=None,
        transport=DiskTransport(tmp_path / "weights", None, LIMITS.start_seconds),
        probe_terms=trial,
    )
    try:
        # Each of them finds the update of the one before.
        for version in range(20):
            engines[0].post_or_fail("/pause", mode="keep")
            engines[0].post_or_fail("/start_weight_update")
            assert publisher.publish(version, iter(weights(trained, tmp_path / "first").items())).probe_mean < 1e-4
    finally:
        publisher.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_trainer_that_is_killed_at_twenty_moments_takes_each_prompt_once(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    runs, random = Runs(tmp_path), Random(45)
    environ: dict[str, str] = {
        Environment.ROLLOUT_URLS: engines[0].await_ready().url,
        Environment.SECRET: SECRET,
        Environment.HOST: "127.0.0.1",
    }
    ahead = {
        "training": {"maxSteps": KILLED_STEPS},
        "grpo": {
            "maxNewTokens": 32,
            "rewards": [{"name": "length"}],
            "recordTokens": True,
            "rollout": {"staleness": 1},
        },
        "checkpoint": {"keep": 1000},
    }
    job = merge_sections(GRPO, ahead)
    try:
        for attempt in range(1, KILLS + 1):
            run = runs.start("killed", attempt=attempt, environ=environ, **job)
            done = len(read_steps(run.folder))
            # Every second kill follows a step, and hits any part of the next one; the others hit a start.
            if attempt % 2:
                await_result(lambda: len(read_steps(run.folder)) > done or not run.is_running(), "a step")  # noqa: B023
            sleep(random.uniform(0, 3))
            assert run.is_running(), run.read_log()
            run.kill()
        last = runs.run_to_end("killed", attempt=KILLS + 1, environ=environ, **job)
    finally:
        runs.close()
    require_nothing_lost([last.folder], KILLED_STEPS)
    assert {line["staleness"] for line in map(json.loads, (last.folder / "steps.jsonl").open())} == {0, 1}


def test_what_an_engine_that_hangs_was_asked_is_answered_by_the_other(
    engines: tuple[Engine, Engine], asked: Asked
) -> None:
    answers = asked.answers(lambda: os.killpg(engines[0].pid, signal.SIGSTOP))
    try:
        asked.are_right(answers)
        assert [engine.url for engine in asked.fleet.serving_engines] == [engines[1].url]
    finally:
        os.killpg(engines[0].pid, signal.SIGCONT)
    # It has the published weights: it serves as soon as it says so.
    await_result(lambda: len(asked.fleet.serving_engines) == 2, "its return")


def test_all_answers_arrive_when_an_engine_is_killed_while_it_generates(
    engines: tuple[Engine, Engine], asked: Asked
) -> None:
    asked.are_right(asked.answers(lambda: os.killpg(engines[0].pid, signal.SIGKILL)))
    assert [engine.url for engine in asked.fleet.serving_engines] == [engines[1].url]


def test_an_engine_that_is_killed_while_it_takes_weights_is_left_out(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    # Both load at once, and neither is asked to finish before both have loaded.
    other = StandIn(updated=lambda _: os.killpg(engines[1].pid, signal.SIGKILL))
    fleet = EngineFleet([engines[1].await_ready().url, other.url], EngineConnection(SECRET), LIMITS)
    trial = ProbeTerms(PROBE, lambda tokens: np.full(len(tokens) - 1, other.probe, np.float32), lambda: 1e-3)
    publisher = Publisher(
        fleet=fleet,
        world=None,
        transport=DiskTransport(tmp_path / "weights", None, LIMITS.start_seconds),
        probe_terms=trial,
    )
    try:
        publisher.publish(1, iter(weights(make_model(6), tmp_path / "first").items()))
        assert [engine.url for engine in fleet.serving_engines] == [other.url]
    finally:
        publisher.close()
        other.close()
