"""A step of GRPO between a generator, rewards and an engine that are simple enough to reckon with."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from moejob_api.derived import RECORDED_STEPS
from moejob_api.job.grpo import Grpo
from moejob_api.job.model import Data
from moejob_trainer.data import prompt_corpus
from moejob_trainer.data.packing import BatchPlan
from moejob_trainer.data.prepared_folder import write_report
from moejob_trainer.data.prompt_corpus import PromptCorpus, PromptReport
from moejob_trainer.data.prompt_loader import PromptLoader, steps_of_epochs
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.objectives import ObjectiveState, StoppedWaiting
from moejob_trainer.objectives.grpo.collecting import PromptSets, RolloutCollector
from moejob_trainer.objectives.grpo.loss import OLD, REFERENCE
from moejob_trainer.objectives.grpo.objective import GroupRelativePolicyOptimization, GrpoSettings, StepServices
from moejob_trainer.objectives.grpo.rank_exchange import PeerRanks
from moejob_trainer.objectives.grpo.rollout_batch import plan_updates
from moejob_trainer.objectives.grpo.sampling import GroupSampler
from moejob_trainer.objectives.grpo.step_record import StepRecorder, outdated_records
from moejob_trainer.rewards.scorer import Scorer
from moejob_trainer.rollouts.interface import (
    Answer,
    EnginesLost,
    FinishReason,
    GenerationRequest,
    RoutedLayers,
    SamplingParams,
    SyncReport,
    WrongWeights,
)
from moejob_trainer.training import LossTerms, MicroBatch, TokenOutputs, UpdateResult
from moejob_trainer.training.micro_batch import ROUTING, Array

END = 1
PLAN = BatchPlan(data=1, tokens=64)
TOKENS = {"yes": [7, END], "no": [8, 9, END], "for ever": [8] * 6}


# Two layers with experts, in which a token goes to the expert of its number, and to the next.
ROUTED = RoutedLayers(layers=3, routed=(1, 2), experts=16, per_token=1)


def _routing(tokens: Array) -> Array:
    return np.stack([tokens, tokens + 1], 1)[..., None].astype(np.uint8)


@dataclass
class Scripted:
    """A generator and publisher: answers by what `said` makes of the prompt's number and the member."""

    said: Callable[[int, int], str]
    version: int = -1
    is_awake: bool = False
    asked: list[GenerationRequest] = field(default_factory=list)
    # The layers whose experts each request asked for.
    routed: list[RoutedLayers | None] = field(default_factory=list)
    # What was returned of these.
    routings: list[ref[Array]] = field(default_factory=list)
    # Of these answers and those before them the weights are lost, once each.
    losses: set[int] = field(default_factory=set)
    # From this answer on there is none, and the run is asked to stop.
    stopped_at: int | None = None
    published: list[int] = field(default_factory=list)
    # Why the next publications fail.
    failures: list[Exception] = field(default_factory=list)
    _outdated: asyncio.Event = field(default_factory=asyncio.Event)
    _given: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerationRequest, sampling: SamplingParams) -> Answer:
        """Return the scripted tokens."""
        assert self.is_awake
        self.asked.append(request)
        self.routed.append(sampling.routing)
        if self.is_stopping():
            await asyncio.Event().wait()
        if len(self.asked) in self.losses:
            self._given.clear()
            self._outdated.set()
        if self._outdated.is_set():
            await self._given.wait()
        tokens = np.array(TOKENS[self.said(request.group, request.member)][: sampling.max_new_tokens], np.int32)
        reason = FinishReason.STOP if tokens[-1] == END else FinishReason.LENGTH
        said = np.full(len(tokens), -0.5, np.float32)
        routing = None if sampling.routing is None else _routing(np.concatenate([request.prompt, tokens])[:-1])
        if routing is not None:
            self.routings.append(ref(routing))
        return Answer(request, tokens, said, np.full(len(tokens), self.version, np.int32), reason, routing)

    def is_stopping(self) -> bool:
        """Return whether the run is asked to stop."""
        return self.stopped_at is not None and len(self.asked) >= self.stopped_at

    async def wait_for_interruption(self) -> None:
        """Wait until the weights are lost, or until the run is asked to stop."""
        while not self.is_stopping() and not self._outdated.is_set():  # noqa: ASYNC110 its event would be of another loop
            await asyncio.sleep(0.05)

    def measure_idle_share(self) -> float:
        """Return a share that no engine measured."""
        return 0.25

    @property
    def stacked_elements(self) -> int:
        """Each expert comes by itself."""
        return 0

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> SyncReport:
        """Note the version."""
        assert not self.is_awake
        self.published.append(version)
        if self.failures:
            raise self.failures.pop()
        self.version, self.is_awake = version, True
        self._outdated.clear()
        self._given.set()
        return SyncReport(version, 0.25, sum(tensor.nbytes for _, tensor in weights), 1e-6, 2e-6, 1e-3)

    def release(self) -> None:
        """Sleep."""
        self.is_awake = False


@dataclass
class Flat:
    """An engine to which every token is as likely as any; each update makes all of them likelier."""

    level: float = -0.5
    # Of each update.
    rise: float = 0.1
    # What old log-probabilities were asked for.
    asked: list[MicroBatch] = field(default_factory=list)

    def compute_outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        """Return the level for every token."""
        self.asked += batches
        return self._said(batches)

    def _said(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        return [
            TokenOutputs(torch.full((len(batch.tokens),), self.level), torch.ones(len(batch.tokens)))
            for batch in batches
        ]

    def compute_reference_outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        """Return a lower level."""
        return Flat(-0.75).compute_outputs(batches)

    def export_weights(self, stacked_elements: int = 0) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002  # a protocol's
        """Yield four bytes."""
        yield "w", torch.zeros(1)

    def begin_step(self, step: int) -> None:
        """Learn at the same rate in each."""

    def update(self, batches: Sequence[MicroBatch], loss: Callable[..., LossTerms]) -> UpdateResult:
        """Add the terms of the loss up."""
        terms = [loss(outputs, batch) for outputs, batch in zip(self._said(batches), batches, strict=True)]
        self.level += self.rise
        weight = sum(float(batch.weights.sum()) for batch in batches)
        return UpdateResult(sum(float(one.total) for one in terms) / weight, 1.0, 1.0, 0)

    def evaluate(self, batches: Sequence[MicroBatch], loss: Callable[..., LossTerms]) -> UpdateResult:
        """Nothing asks for it."""
        raise NotImplementedError


def _grpo(**settings: Any) -> Grpo:
    written = {"groupSize": 2, "promptsPerStep": 2, "maxNewTokens": 6, "rewards": [{"name": "exact-match"}], **settings}
    return Grpo.model_validate_json(json.dumps(written))


def _prompts(count: int = 3) -> list[Prompt]:
    return [Prompt((3, 4 + n), f"question {n}", {"answer": "yes"}, f"line {n}") for n in range(count)]


def _corpus(folder: Path) -> PromptCorpus:
    written, fingerprint = prompt_corpus.write_prompts(folder, map(prompt_corpus.encode_prompt_line, _prompts()))
    write_report(folder, PromptReport("questions", "train", fingerprint, written, written, 0))
    return PromptCorpus(folder)


def _data(**settings: Any) -> Data:
    return Data.model_validate_json(
        json.dumps({"train": [{"source": "questions", "format": "Prompts"}], "shuffle": False, **settings})
    )


@dataclass
class Run:
    """A run of one rank."""

    objective: GroupRelativePolicyOptimization
    collector: RolloutCollector
    engines: Scripted
    engine: Flat = field(default_factory=Flat)

    def step(self, number: int) -> tuple[list[list[MicroBatch]], list[UpdateResult]]:
        """Run a step as the loop does."""
        batches, results = [], []
        for update in self.objective.updates(number, self.engine):
            batches.append([*update])
            results.append(self.engine.update(update, self.objective.loss))
        return batches, results

    def seed(self, group: int, member: int) -> int:
        """Return the seed of an answer that was asked for."""
        return next(each.seed for each in self.engines.asked if (each.group, each.member) == (group, member))


TEXTS = {tuple(tokens[:-1] if tokens[-1] == END else tokens): text for text, tokens in TOKENS.items()}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    open_collectors: list[RolloutCollector] = []

    def start(
        grpo: Grpo,
        said: Callable[[int, int], str],
        updates: int = 1,
        evaluation: Sequence[Prompt] = (),
        routed: RoutedLayers | None = None,
    ) -> Run:
        engines = Scripted(said)
        scorer = Scorer(grpo.rewards, grpo.reward_failure)
        asker = GroupSampler(engines, scorer, lambda tokens: TEXTS[tuple(tokens)], seed=5)
        prompts = PromptSets(PromptLoader([_corpus(tmp_path)], _data()), evaluation)
        sampling = SamplingParams(grpo.temperature, grpo.top_p, grpo.max_new_tokens, (END,), routed)
        collector = RolloutCollector(grpo, asker, prompts, sampling, tmp_path).__enter__()
        open_collectors.append(collector)
        recorder = StepRecorder(tmp_path, {}, lambda: collector.last_sampled) if grpo.record_tokens else None
        parts = StepServices(PeerRanks(), engines, collector, recorder=recorder, has_agreed_to_stop=engines.is_stopping)
        return Run(GroupRelativePolicyOptimization(GrpoSettings(grpo, PLAN, updates, 5), parts), collector, engines)

    yield start
    for collector in open_collectors:
        collector.__exit__(None, None, None)


def _first_is_right(_: int, member: int) -> str:
    return "yes" if member == 0 else "no"


def test_a_step_learns_from_the_answers_that_were_rewarded(started: Callable[..., Run]) -> None:
    run = started(_grpo(advantage="DrGRPO"), _first_is_right)
    ((batch,),), (result,) = run.step(0)
    # Two groups of a right answer of two tokens and a wrong one of three: -(4 x 0.5 - 6 x 0.5) / 10.
    assert result.loss == pytest.approx(0.1)
    assert float(batch.weights.sum()) == 10
    metrics = run.objective.metrics()
    assert metrics["reward"] == 0.5
    assert metrics["reward/exact-match"] == 0.5
    assert metrics["answerTokens"] == 10
    assert metrics["truncated"] == 0
    assert metrics["version"] == metrics["staleness"] == 0
    assert metrics["syncBytes"] == 4
    assert metrics["mismatchMaximum"] == 0
    phases = {"syncSeconds", "generateSeconds", "rewardSeconds", "releaseSeconds", "outputsSeconds", "learnSeconds"}
    assert phases <= metrics.keys()
    assert metrics["generateSeconds"] == pytest.approx(run.objective.waited_seconds(), abs=1e-6)
    # Prompts of two tokens, to answers of two and of three.
    assert metrics["trainingTokensPerSecond"] * metrics["learnSeconds"] == pytest.approx(18, rel=0.02)


def test_engines_that_are_never_behind_make_the_same_steps_however_far_ahead_they_run(
    started: Callable[..., Run],
) -> None:
    losses = []
    for staleness in (0, 1, 3):
        run = started(
            _grpo(rollout={"staleness": staleness}), lambda group, member: "no" if group % 3 > member else "yes"
        )
        run.engine.rise = 0.0
        results = [run.step(number)[1] for number in range(6)]
        losses.append([result.loss for (result,) in results])
        assert run.objective.metrics()["staleness"] == staleness
        assert run.objective.metrics()["groupsPending"] == 2 * staleness
        assert len(run.engines.asked) == (6 + staleness) * 4
    assert losses[0] == losses[1] == losses[2]
    assert len(set(losses[0])) > 1


@contextmanager
def _judge_that_holds(prompt: str, until: threading.Event) -> Iterator[str]:
    """A reward service that lets the first answer to a prompt wait; its address."""
    is_first = threading.Lock()

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            batch = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if batch["prompts"] == [prompt] and is_first.acquire(blocking=False):
                until.wait()
            scores = [float(text == "yes") for text in batch["completions"]]
            body = json.dumps({"scores": scores}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        until.set()
        server.shutdown()


def test_a_reward_that_takes_long_holds_up_the_step_that_needs_it_and_no_other(started: Callable[..., Run]) -> None:
    is_judged = threading.Event()
    with _judge_that_holds("question 0", is_judged) as url:
        reward = {"url": url, "batchSize": 1, "timeoutSeconds": 600}
        run = started(_grpo(rewards=[reward], rollout={"staleness": 1}), _first_is_right)
        run.step(0)
        assert 0 not in {group.prompt.number for group in run.collector.last_sampled.groups}
        is_judged.set()
        run.step(1)
        assert 0 in {group.prompt.number for group in run.collector.last_sampled.groups}


def test_only_what_the_model_wrote_carries_weight(started: Callable[..., Run]) -> None:
    run = started(_grpo(promptsPerStep=1), _first_is_right)
    ((batch,),), _ = run.step(0)
    for start, length in zip(batch.cu_lengths.tolist(), batch.lengths, strict=False):
        weights = batch.weights[start : start + length].tolist()
        # Of two tokens of the prompt the first predicts the second, which the model did not write.
        assert weights == [0.0, *[1.0] * (length - 2), 0.0]


def test_the_experts_of_engines_are_held_once_while_a_step_learns(started: Callable[..., Run]) -> None:
    run = started(_grpo(), _first_is_right, routed=ROUTED)
    next(run.objective.updates(0, run.engine))
    assert [known() is None for known in run.engines.routings] == [True] * 4


@pytest.mark.parametrize("updates", [1, 2])
def test_the_experts_of_engines_come_with_their_tokens(started: Callable[..., Run], updates: int) -> None:
    run = started(_grpo(epochsPerStep=updates), _first_is_right, updates=updates, routed=ROUTED)
    batches, _ = run.step(0)
    assert len(batches) == updates**2
    for batch in [*run.engine.asked, *(batch for (batch,) in batches)]:
        expected = torch.zeros_like(batch.extras[ROUTING])
        for start, length in zip(batch.cu_lengths.tolist(), batch.lengths, strict=False):
            # The last token and padding route by themselves.
            known = slice(start, start + max(0, length - 1))
            expected[known] = 1 + torch.from_numpy(_routing(batch.tokens[known].numpy()))
        assert torch.equal(batch.extras[ROUTING], expected)
        assert expected.any()
    assert len(run.engine.asked) == (updates > 1)


def test_answers_of_an_evaluation_need_no_experts(started: Callable[..., Run]) -> None:
    run = started(_grpo(evaluation={"samples": 2}), _first_is_right, evaluation=_prompts(2), routed=ROUTED)
    run.objective.evaluate(0, run.engine)
    assert run.engines.routed == [None] * 4
    run.step(0)
    assert run.engines.routed[4:] == [ROUTED] * 4


def test_engines_sleep_while_the_trainer_learns(started: Callable[..., Run]) -> None:
    run = started(_grpo(), _first_is_right)
    for _ in run.objective.updates(0, run.engine):
        assert not run.engines.is_awake


def test_later_updates_of_a_step_are_measured_against_what_was_said_before_the_first(
    started: Callable[..., Run],
) -> None:
    run = started(_grpo(epochsPerStep=2), _first_is_right, updates=2)
    batches, _ = run.step(0)
    assert len(batches) == 4
    for (batch,) in batches:
        learned = batch.weights > 0
        assert batch.extras[OLD][learned].tolist() == pytest.approx([-0.5] * int(learned.sum()))
    sizes = [sum(length > 0 for length in batch.lengths) for (batch,) in batches]
    assert sizes == [2, 2, 2, 2]


def test_a_reference_is_asked_only_where_it_counts(started: Callable[..., Run]) -> None:
    ((without,),), _ = started(_grpo(), _first_is_right).step(0)
    ((batch,),), _ = started(_grpo(kl={"coefficient": 0.1}), _first_is_right).step(0)
    assert REFERENCE not in without.extras
    assert set(batch.extras[REFERENCE][batch.weights > 0].tolist()) == {-0.75}


def test_a_divergence_in_the_reward_moves_advantages_by_length(started: Callable[..., Run]) -> None:
    grpo = _grpo(advantage="DrGRPO", kl={"kind": "K1", "coefficient": 2.0, "applyTo": "Reward"})
    ((batch,),), _ = started(grpo, _first_is_right).step(0)
    # 1 - 2 x 2 x 0.25 = 0 and 0 - 3 x 2 x 0.25 = -1.5: advantages 0.75 and -0.75.
    found = set(batch.extras["advantage"][batch.weights > 0].tolist())
    assert found == {0.75, -0.75}


def test_a_group_with_a_failed_reward_is_left_out_and_counted(started: Callable[..., Run]) -> None:
    grpo = _grpo(rewards=[{"name": "numeric", "reference": "missing"}, {"name": "exact-match"}])
    with pytest.raises(BadConfiguration, match=r"every group of step 1 was dropped.*has no field missing"):
        started(grpo, _first_is_right).step(0)


def test_groups_without_signal_are_replaced_up_to_a_bound(started: Callable[..., Run]) -> None:
    grpo = _grpo(promptsPerStep=1, dynamicSampling={"overSampling": 3})
    run = started(grpo, lambda group, member: "yes" if group == 1 and member == 0 else "no")
    run.step(0)
    assert {request.group for request in run.engines.asked} == {0, 1}
    # One that was replaced was generated, too: three tokens, two times, and five of the other.
    assert run.objective.metrics()["generatedTokens"] == 11
    assert run.objective.metrics()["answerTokens"] == 5
    assert run.objective.metrics()["groupsReplaced"] == 1
    assert run.objective.metrics()["groupsWithoutSignal"] == 0
    # The group of step 0 that had one was number 1; none of the next three has.
    run.step(1)
    assert {request.group for request in run.engines.asked} == {0, 1, 2, 3, 4}
    assert run.objective.metrics()["groupsWithoutSignal"] == 1


def test_answers_without_an_end_are_left_out_where_that_is_asked_for(started: Callable[..., Run]) -> None:
    grpo = _grpo(promptsPerStep=1, overlong={"filter": True})
    ((batch,),), _ = started(grpo, lambda _, member: "yes" if member else "for ever").step(0)
    assert float(batch.weights.sum()) == 2
    with pytest.raises(BadConfiguration, match="none has an end"):
        started(grpo, lambda *_: "for ever").step(0)


def test_a_long_answer_pays_its_penalty(started: Callable[..., Run]) -> None:
    grpo = _grpo(overlong={"penalty": 0.5, "penaltyTokens": 2})
    run = started(grpo, lambda _, member: "yes" if member else "for ever")
    run.step(0)
    assert run.objective.metrics()["reward"] == pytest.approx((1 - 0.5) / 2)


def test_a_resumed_run_asks_the_prompts_that_come_next_with_the_same_seeds(started: Callable[..., Run]) -> None:
    whole = started(_grpo(), _first_is_right)
    whole.step(0)
    saved = ObjectiveState(json.loads(json.dumps(whole.objective.snapshot_state().entries)))
    whole.step(1)
    resumed = started(_grpo(), _first_is_right)
    resumed.objective.load_state(saved)
    resumed.step(1)
    expected = [(request.group, request.member, request.seed) for request in whole.engines.asked[4:]]
    assert [(request.group, request.member, request.seed) for request in resumed.engines.asked] == expected
    assert len({seed for *_, seed in expected}) == 4


def _restart(run: Run, resumed: Run) -> Run:
    state = run.objective.snapshot_state()
    resumed.objective.load_state(ObjectiveState(json.loads(json.dumps(state.entries)), state.arrays))
    return resumed


def test_a_resumed_run_takes_the_groups_that_were_finished_ahead_and_asks_for_none_of_them(
    started: Callable[..., Run],
) -> None:
    whole = started(_grpo(rollout={"staleness": 1}), _first_is_right)
    whole.step(0)
    resumed = _restart(whole, started(_grpo(rollout={"staleness": 1}), lambda *_: "for ever"))
    expected = [batch.tokens.tolist() for (batch,) in whole.step(1)[0]]
    assert [batch.tokens.tolist() for (batch,) in resumed.step(1)[0]] == expected
    # Groups 2 and 3 came from the checkpoint.
    assert {request.group for request in resumed.engines.asked} == {4, 5}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"temperature": 0.5}, id="another distribution"),
        pytest.param({"groupSize": 3}, id="groups of another size"),
        pytest.param({"rewards": [{"name": "exact-match"}] * 2}, id="one more reward"),
        pytest.param({"rewards": [{"name": "exact-match", "weight": 2.0}]}, id="another weight"),
        pytest.param({"overlong": {"penalty": 0.5, "penaltyTokens": 2}}, id="a penalty"),
    ],
)
def test_groups_of_other_settings_are_asked_again_with_their_numbers(
    started: Callable[..., Run], changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    whole = started(_grpo(rollout={"staleness": 1}), _first_is_right)
    whole.step(0)
    resumed = _restart(whole, started(_grpo(rollout={"staleness": 1}, **changes), _first_is_right))
    resumed.step(1)
    assert sorted({request.group for request in resumed.engines.asked}) == [2, 3, 4, 5]
    assert "2 groups of the checkpoint were sampled or rewarded with other settings" in capfd.readouterr().err


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_that_is_asked_to_stop_while_it_waits_is_made_later_from_the_same_answers(
    started: Callable[..., Run], staleness: int
) -> None:
    grpo = _grpo(rollout={"staleness": staleness})
    undisturbed, stopped = started(grpo, _first_is_right), started(grpo, _first_is_right)
    # The first group is complete, and its step has taken it.
    stopped.engines.stopped_at = 3
    with pytest.raises(StoppedWaiting):
        stopped.step(0)
    assert not stopped.engines.is_awake
    resumed = _restart(stopped, started(grpo, _first_is_right))
    assert resumed.step(0)[1] == undisturbed.step(0)[1]
    # No group twice, none left out.
    assert sorted({request.group for request in resumed.engines.asked}) == list(range(1, 2 + 2 * staleness))


def test_a_publication_that_is_asked_to_stop_is_not_repeated(started: Callable[..., Run]) -> None:
    run = started(_grpo(), _first_is_right)
    run.engines.stopped_at, run.engines.failures = 0, [EnginesLost("no engine is ready")]
    with pytest.raises(StoppedWaiting):
        run.step(2)
    assert run.engines.published == [2]


def test_an_evaluation_that_is_asked_to_stop_takes_no_answers(started: Callable[..., Run]) -> None:
    run = started(_grpo(), _first_is_right, evaluation=_prompts(1))
    run.engines.stopped_at = 1
    with pytest.raises(StoppedWaiting):
        run.objective.evaluate(1, run.engine)
    assert not run.engines.is_awake


def test_samples_of_a_step_are_written_with_what_they_were_worth(started: Callable[..., Run], tmp_path: Path) -> None:
    started(_grpo(loggedAnswers=3, advantage="DrGRPO"), _first_is_right).step(4)
    lines = [json.loads(line) for line in (tmp_path / "samples/step-5.jsonl").read_text().splitlines()]
    assert [line["advantage"] for line in lines] == [0.5, -0.5, 0.5]
    assert lines[0] | {"advantage": 0.5} == {
        # By the number of its line in the step log; the weights that answered are those of four updates.
        "step": 5,
        "group": 0,
        "member": 0,
        "prompt": "question 0",
        "answer": "yes",
        "finishReason": "Stop",
        "reward": 1.0,
        "rewards": {"exact-match": 1.0},
        "advantage": 0.5,
        "version": 4,
    }


def test_a_recorded_step_has_every_answer_and_says_which_update_learned_from_it(
    started: Callable[..., Run], tmp_path: Path
) -> None:
    grpo = _grpo(
        promptsPerStep=1, recordTokens=True, dynamicSampling={}, overlong={"filter": True}, epochsPerStep=2, clipLow=0.5
    )

    def said(group: int, member: int) -> str:
        # The first group has no signal, and half of the second no end.
        return "yes" if group == 0 or member == 0 else "for ever"

    run = started(grpo, said)
    _, results = run.step(4)
    run.objective.record_step(5, results)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["step-5.safetensors"]
    with safe_open(tmp_path / "tokens/step-5.safetensors", "np") as file:
        facts, arrays = file.metadata(), {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
    assert json.loads(facts["outcomes"]) == ["Learned", "RewardFailed", "NoSignal"]
    assert json.loads(facts["rewardNames"]) == ["exact-match"]
    assert arrays["group.number"] == [1, 0]
    assert arrays["group.outcome"] == [0, 2]
    assert arrays["prompt.tokens"] == [3, 5, 3, 4]
    assert arrays["answer.length"] == [2, 6, 2, 2]
    assert arrays["answer.truncated"] == [0, 1, 0, 0]
    assert arrays["answer.reward"] == [1.0, 0.0, 1.0, 1.0]
    assert arrays["answer.rewards"] == [[1.0], [0.0], [1.0], [1.0]]
    assert arrays["answer.seed"] == [run.seed(*place) for place in ((1, 0), (1, 1), (0, 0), (0, 1))]
    assert arrays["token.id"] == TOKENS["yes"] + TOKENS["for ever"] + 2 * TOKENS["yes"]
    assert arrays["token.engine"] == [-0.5] * 12
    assert arrays["token.version"] == [4] * 12
    assert arrays["token.advantage"] == pytest.approx([0.7070] * 2 + [-0.7070] * 6, abs=1e-4)
    assert arrays["token.old"] == [-0.5] * 8
    assert "token.reference" not in arrays
    assert arrays["update.answers"] == [0, 1, 0, 1]
    assert arrays["update.size"] == [2, 2]
    assert arrays["update.loss"] == [result.loss for result in results]
    assert arrays["update.applied"] == [1, 1]


def test_updates_that_learn_from_nothing_are_not_in_the_record(started: Callable[..., Run], tmp_path: Path) -> None:
    grpo = _grpo(recordTokens=True, overlong={"filter": True})
    run = started(grpo, lambda group, member: "for ever" if group else ("yes", "no")[member], updates=2)
    _, results = run.step(0)
    run.objective.record_step(1, results)
    with safe_open(tmp_path / "tokens/step-1.safetensors", "np") as file:
        assert file.get_tensor("update.answers").tolist() == [0, 1]
        assert len(file.get_tensor("token.id")) == 2 + 3 + 2 * 6


def test_a_step_is_not_recorded_unless_that_is_asked_for(started: Callable[..., Run], tmp_path: Path) -> None:
    run = started(_grpo(), _first_is_right)
    run.objective.record_step(1, run.step(0)[1])
    assert not (tmp_path / "tokens").exists()


def test_records_of_steps_long_past_are_not_kept() -> None:
    names = ["step-1.safetensors", "step-2.safetensors", "step-3.safetensors", "step-x.safetensors", "notes"]
    assert RECORDED_STEPS == 100
    assert outdated_records(map(Path, names), 102) == [Path("step-1.safetensors"), Path("step-2.safetensors")]


def test_an_evaluation_tells_mean_and_pass_of_k_answers(started: Callable[..., Run]) -> None:
    grpo = _grpo(evaluation={"samples": 4})
    asked = _prompts(2)
    run = started(grpo, lambda group, member: "yes" if group % 2 == 0 and member == 3 else "no", evaluation=asked)
    assert run.objective.evaluate(7, run.engine) == {"evalMean@4": 1 / 8, "evalPass@4": 0.5, "evalFailed": 0}
    assert run.engines.version == 7
    assert not run.engines.is_awake


def test_engines_that_lose_the_weights_are_given_them_again_and_asked_nothing_twice(
    started: Callable[..., Run],
) -> None:
    undisturbed, run = started(_grpo(), _first_is_right), started(_grpo(), _first_is_right)
    run.engines.losses = {2, 4}
    expected, found = undisturbed.step(3), run.step(3)
    assert run.engines.published == [3, 3]
    assert [(one.group, one.member) for one in run.engines.asked] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[1] == expected[1]
    assert not run.engines.is_awake


def test_an_evaluation_outlives_engines_that_lose_the_weights(started: Callable[..., Run]) -> None:
    run = started(_grpo(evaluation={"samples": 2}), _first_is_right, evaluation=_prompts(2))
    run.engines.losses = {3}
    assert run.objective.evaluate(7, run.engine) == {"evalMean@2": 0.5, "evalPass@2": 1.0, "evalFailed": 0}
    assert run.engines.published == [7, 7]


def test_weights_that_no_engine_keeps_are_published_a_few_times(
    started: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(_grpo(), _first_is_right)
    run.engines.failures = [EnginesLost("no engine has kept the weights")] * 4
    run.step(0)
    assert run.engines.published == [0] * 5
    told = "the weights of step 0 are published once more: no engine has kept the weights"
    assert capsys.readouterr().err.count(told) == 4
    run.engines.failures = [EnginesLost("gone again")] * 5
    with pytest.raises(EnginesLost, match="gone again"):
        run.step(1)


def test_weights_that_are_wrong_once_are_published_again(
    started: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(_grpo(), _first_is_right)
    run.engines.failures = [WrongWeights("0.2 where 0.1 is allowed"), EnginesLost("gone")]
    run.step(0)
    assert run.engines.published == [0] * 3
    assert "the weights of step 0 are published once more: 0.2 where 0.1 is allowed" in capsys.readouterr().err


def test_weights_that_are_wrong_twice_end_the_job_and_not_only_this_start_of_it(started: Callable[..., Run]) -> None:
    run = started(_grpo(), _first_is_right)
    run.engines.failures = [WrongWeights("0.2 where 0.1 is allowed")] * 3
    # A rank ends with 78 for it, which no launcher restarts.
    with pytest.raises(BadConfiguration, match=r"0\.2 where 0\.1 is allowed"):
        run.step(0)
    assert run.engines.published == [0] * 2


def test_steps_of_epochs_ask_every_prompt_as_often_as_said() -> None:
    assert steps_of_epochs(prompts=10, epochs=1.5, prompts_per_step=4) == 4


@pytest.mark.parametrize(("aggregation", "sizes"), [("Group", [4, 2]), ("Token", [3, 3])])
def test_groups_that_were_dropped_let_no_update_cut_another_whose_mean_it_takes(
    aggregation: str, sizes: list[int]
) -> None:
    # Three groups of two are left for two updates in each of two epochs.
    cut = plan_updates(np.arange(6) // 2, _grpo(lossAggregation=aggregation, groupSize=2, epochsPerStep=2), 2, (5, 0))
    assert [len(part) for part in cut] == [*sizes, *sizes]
    assert all(aggregation == "Token" or {number ^ 1 for number in part} == set(part) for part in cut)
