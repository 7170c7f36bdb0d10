"""A real engine gets other weights in the middle of answers: each number of a token is that of the weights it names."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines import SECRET, Engine
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetGenerator, FleetLimits
from moejob_trainer.rollouts.interface import Answer, FinishReason, GenerationRequest, RoutedLayers, SamplingParams
from moejob_trainer.rollouts.publisher import EngineTerms, ProbeTerms, Publisher
from moejob_trainer.rollouts.transports.disk import DiskTransport
from rollout.references import lay_out, log_probabilities, make_model, published_tensors
from trainer.runs import await_result

FAMILY = "qwen3_moe"
LIMITS = FleetLimits(start_seconds=900, silence_seconds=120, answer_seconds=900, look_seconds=0.2)
LAYERS = RoutedLayers(layers=2, routed=(0, 1), experts=8, per_token=2)
# Long enough to be cut in the middle, wherever a busy machine cuts; and to be cut twice.
SAMPLING = SamplingParams(temperature=0.8, top_p=1.0, max_new_tokens=900, stop_tokens=(), routing=LAYERS)
TWICE_AS_LONG = replace(SAMPLING, max_new_tokens=1800)
PROBE = np.arange(48, dtype=np.int32) * 7919 % 512
# A token is cut off behind this many; float32 puts engine and Transformers 2e-6 apart.
TOKENS_BEFORE, CLOSE, FARTHEST = 40, 5e-6, 1e-4
# More than a block of the engine's cache, which keeps whole blocks only.
PROMPT_TOKENS = 150


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("run")
    lay_out(FAMILY, folder / "engine-model")
    job: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "data": {"maxLength": 256},
        "grpo": {
            "maxNewTokens": TWICE_AS_LONG.max_new_tokens,
            "routingReplay": True,
            "rollout": {"placement": "Separate"},
        },
    }
    started = Engine(folder, folder / "engine.log", **job).await_ready()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    """The weights of three versions, which have nothing in common."""
    return [make_model(FAMILY, seed) for seed in (41, 42, 43)]


class Trainer:
    """A trainer that publishes one of the models, and a version for each."""

    def __init__(self, engine: Engine, folder: Path, models: Sequence[PreTrainedModel], terms: EngineTerms) -> None:
        self.engine, self.models = engine, models
        self.fleet = EngineFleet([engine.url], EngineConnection(SECRET), LIMITS)
        self.generator = FleetGenerator(self.fleet, salts_cache=terms.keeps_cache)
        self.published = models[0]
        self.publisher = Publisher(
            fleet=self.fleet,
            world=None,
            transport=DiskTransport(folder / "weights", None, LIMITS.start_seconds),
            probe_terms=ProbeTerms(PROBE, self._probe, lambda: 1e-3),
            engine_terms=terms,
        )

    def publish(self, version: int) -> None:
        self.published = self.models[version]
        self.publisher.publish(version, iter(published_tensors(self.published).items()))

    def _probe(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return np.array(log_probabilities(self.published, tokens[:1].tolist(), tokens[1:].tolist()), np.float32)

    def answers(self, count: int, disturb: Callable[[], None], sampling: SamplingParams = SAMPLING) -> list[Answer]:
        """Return answers to different prompts, with a disturbance once each has some tokens."""
        before = self._generated_tokens()
        requests = [
            GenerationRequest(group, 0, np.arange(group, group + PROMPT_TOKENS, dtype=np.int32), seed=group)
            for group in range(count)
        ]

        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*(self.generator.generate(request, sampling) for request in requests))

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(lambda: asyncio.run(all_of_them()))
            await_result(lambda: self._generated_tokens() >= before + count * TOKENS_BEFORE, "tokens of each answer")
            disturb()
            return asking.result(600)

    def _generated_tokens(self) -> float:
        page = self.engine.get("/metrics").body
        found = re.search(r"^vllm:generation_tokens_total\{.*\} ([0-9.e+]+)$", page, re.MULTILINE)
        return 0.0 if found is None else float(found[1])


@contextmanager
def trainer_of(engine: Engine, folder: Path, models: Sequence[PreTrainedModel], **terms: Any) -> Iterator[Trainer]:
    made = Trainer(engine, folder, models, EngineTerms(**terms))
    try:
        made.publish(0)
        yield made
    finally:
        made.publisher.close()


def switches(answer: Answer) -> list[int]:
    """Return the places at which the version changes."""
    return (np.flatnonzero(np.diff(answer.versions)) + 1).tolist()


def distances(models: Sequence[PreTrainedModel], answer: Answer) -> npt.NDArray[np.float64]:
    """Return |engine - Transformers| of each token, by the weights of its version on the whole text before it."""
    by_version = np.array(
        [
            log_probabilities(model, answer.request.prompt.tolist(), answer.tokens.tolist(), SAMPLING.temperature)
            for model in models
        ]
    )
    return np.abs(by_version[answer.versions, np.arange(len(answer.tokens))] - answer.log_probabilities)


def check_numbers(
    models: Sequence[PreTrainedModel], answers: Sequence[Answer], sampling: SamplingParams = SAMPLING
) -> None:
    for answer in answers:
        assert len(answer.tokens) == sampling.max_new_tokens
        assert answer.finish_reason is FinishReason.LENGTH
        apart = distances(models, answer)
        for place in np.split(np.arange(len(apart)), switches(answer)):
            assert apart[place].mean() < CLOSE, (place[0], apart[place].mean())
        assert apart.max() < FARTHEST


def chosen_experts(model: PreTrainedModel, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the experts that Transformers chooses for each token but the last, sorted. [tokens - 1, layers, k]"""
    seen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: seen.append(output[2].sort(-1).values[:-1]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([[*tokens]]))
    for hook in hooks:
        hook.remove()
    found: npt.NDArray[np.int64] = torch.stack(seen, 1).numpy()
    return found


def check_experts(models: Sequence[PreTrainedModel], answers: Sequence[Answer]) -> None:
    """Check that each token was read by the experts of the weights that chose the token behind it."""
    for answer in answers:
        text = [*answer.request.prompt.tolist(), *answer.tokens.tolist()]
        by_version = np.stack([chosen_experts(model, text) for model in models])
        # The prompt, too, was read by the weights that chose the first token.
        readers = np.concatenate([np.repeat(answer.versions[:1], len(answer.request.prompt) - 1), answer.versions])
        expected = by_version[readers, np.arange(len(readers))]
        assert answer.routing is not None
        np.testing.assert_array_equal(np.sort(answer.routing, -1), expected)


def test_answers_in_flight_are_exact_before_and_behind_new_weights(
    engine: Engine, models: list[PreTrainedModel], tmp_path: Path
) -> None:
    with trainer_of(engine, tmp_path, models) as trainer:
        answers = trainer.answers(4, lambda: trainer.publish(1))
        cut = [switches(answer) for answer in answers]
        assert all(len(places) == 1 and 0 < places[0] < SAMPLING.max_new_tokens for places in cut), cut
        assert {(int(answer.versions[0]), int(answer.versions[-1])) for answer in answers} == {(0, 1)}
        check_numbers(models, answers)
        check_experts(models, answers)
        # The same requests without a disturbance: tokens before the switch are those of the old weights alone.
        trainer.publish(0)
        undisturbed = trainer.answers(4, lambda: None)
        for answer, other, (place,) in zip(answers, undisturbed, cut, strict=True):
            assert answer.tokens[:place].tolist() == other.tokens[:place].tolist()
            assert answer.tokens.tolist() != other.tokens.tolist()


def test_answers_of_a_stopped_engine_are_exact_before_and_behind_each_stop(
    engine: Engine, models: list[PreTrainedModel], tmp_path: Path
) -> None:
    with trainer_of(engine, tmp_path, models, is_colocated=True) as trainer:
        idle: list[float] = []

        def stop_twice() -> None:
            for version in (1, 2):
                trainer.publisher.release()
                assert trainer.fleet.engines[0].in_flight == 0
                before = engine.cpu_seconds()
                trainer.generator.measure_idle_share()
                threading.Event().wait(0.5)
                idle.extend((engine.cpu_seconds() - before, trainer.generator.measure_idle_share()))
                generated = trainer._generated_tokens()  # noqa: SLF001  # of this file
                trainer.publish(version)
                await_result(
                    lambda before=generated: trainer._generated_tokens() >= before + TOKENS_BEFORE,  # type: ignore[misc]  # noqa: SLF001
                    "further tokens",
                )

        answers = trainer.answers(4, stop_twice, TWICE_AS_LONG)
        assert all(len(switches(answer)) == 2 for answer in answers), [switches(answer) for answer in answers]
        check_numbers(models, answers, TWICE_AS_LONG)
        check_experts(models, answers)
        # While the trainer learns, its cores are its own.
        assert idle[0] < 0.2
        assert idle[1] == idle[3] == 1.0


@pytest.mark.thorough
def test_with_keys_of_older_weights_only_unfinished_answers_are_inexact(
    engine: Engine, models: list[PreTrainedModel], tmp_path: Path
) -> None:
    with trainer_of(engine, tmp_path, models, keeps_cache=True) as trainer:
        answers = trainer.answers(2, lambda: trainer.publish(1))
        for answer in answers:
            (place,) = switches(answer)
            apart = distances(models, answer)
            assert apart[:place].mean() < CLOSE
            assert apart[place:].mean() > 0.1
        # The prompts are in the cache as the older weights have read them.
        check_numbers(models, trainer.answers(2, lambda: None))
