"""Groups that are asked for ahead of the steps that take them, with an engine and a clock that tests command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejob_api.job.grpo import Grpo
from moejob_api.job.model import Data
from moejob_trainer.data import prompt_corpus
from moejob_trainer.data.prepared_folder import write_report
from moejob_trainer.data.prompt_corpus import PromptCorpus, PromptReport
from moejob_trainer.data.prompt_loader import NumberedPrompt, PromptLoader
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.objectives.grpo.group_queue import GroupQueue, GroupTimeout, QueueContents
from moejob_trainer.objectives.grpo.sampling import AnswerGroup, ScoredAnswer
from moejob_trainer.rewards.scorer import CompletionScore
from moejob_trainer.rollouts.interface import Answer, FinishReason, GenerationRequest

# Seconds after which a step asks again for a group that it waits for.
TIMEOUT = 100
# An answer that never ends.
ENDLESS = 1e9
PROMPTS = 3


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing is left to do before it."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0

    def time(self) -> float:
        return self._virtual_now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]  # the base class's own
            timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]  # ditto
            self._virtual_now = max(self._virtual_now, min(timers, default=self._virtual_now))
        super()._run_once()  # type: ignore[misc]  # ditto


def make_grpo(staleness: int, prompts_per_step: int, **extra: Any) -> Grpo:
    written = {
        "groupSize": 2,
        "promptsPerStep": prompts_per_step,
        "maxNewTokens": 6,
        "rewards": [{"name": "exact-match"}],
        "rollout": {"staleness": staleness, "answerTimeoutSeconds": TIMEOUT},
        **extra,
    }
    return Grpo.model_validate_json(json.dumps(written))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PromptCorpus:
    folder = tmp_path_factory.mktemp("questions")
    prompts = [Prompt((3, 4 + n), f"question {n}", {"answer": "yes"}, f"line {n}") for n in range(PROMPTS)]
    written, fingerprint = prompt_corpus.write_prompts(folder, map(prompt_corpus.encode_prompt_line, prompts))
    write_report(folder, PromptReport("questions", "train", fingerprint, written, written, 0))
    return PromptCorpus(folder)


def make_loader(corpus: PromptCorpus) -> PromptLoader:
    written = {"train": [{"source": "questions", "format": "Prompts"}], "shuffle": False}
    return PromptLoader([corpus], Data.model_validate_json(json.dumps(written)))


Rewards = Callable[[int], Sequence[float]]


def differing_rewards(_: int) -> Sequence[float]:
    return (1.0, 0.0)


@dataclass
class VirtualRun:
    """A trainer, and an engine that takes for each group the seconds that `durations` names, by number and attempt."""

    grpo: Grpo
    loader: PromptLoader
    durations: Callable[[int, int], float]
    learn_seconds: Callable[[int], float] = lambda _: 1.0
    rewards: Rewards = differing_rewards
    version: int = -1
    queue: GroupQueue = field(init=False)
    # Numbers of the groups of each step; the ages of their tokens; the most groups that were pending.
    trained: dict[int, list[int]] = field(default_factory=dict)
    left_out: dict[int, list[int]] = field(default_factory=dict)
    oldest_ages: list[int] = field(default_factory=list)
    most_pending: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    asked_again: int = 0

    def __post_init__(self) -> None:
        self.queue = GroupQueue(self.grpo, self.loader, self.sample_group)

    async def sample_group(self, prompt: NumberedPrompt, attempt: int) -> AnswerGroup:
        """Return two answers, of all versions that were published while they were written."""
        self.asked.append((prompt.number, attempt))
        first_version = self.version
        contents = self.queue.list_contents()
        self.most_pending = max(self.most_pending, len(contents.finished) + len(contents.unfinished))
        await asyncio.sleep(self.durations(prompt.number, attempt))
        versions = np.arange(first_version, self.version + 1, dtype=np.int32)
        answers = []
        for member, reward in enumerate(self.rewards(prompt.number)):
            request = GenerationRequest(prompt.number, member, np.array([3], np.int32), 0)
            count = len(versions)
            tokens, said = np.full(count, 7, np.int32), np.zeros(count, np.float32)
            answer = Answer(request, tokens, said, versions, FinishReason.STOP)
            answers.append(ScoredAnswer(answer, "", CompletionScore(reward, {"exact-match": reward}), reward, 0.0))
        return AnswerGroup(prompt, tuple(answers))

    async def train(self, steps: range) -> None:
        """Make steps: publish, take groups, learn."""
        for step in steps:
            self.version = step
            sampled = await self.queue.take_groups(step)
            self.trained[step] = [group.prompt.number for group in sampled.groups]
            self.left_out[step] = [each.group.prompt.number for each in sampled.left_out_groups]
            self.asked_again += sampled.asked_again
            versions = [answer.answer.versions.min() for group in sampled.groups for answer in group.answers]
            self.oldest_ages.append(step - int(min(versions)))
            await asyncio.sleep(self.learn_seconds(step))


def run_virtually(coroutine: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


async def train_and_stop(run: VirtualRun, steps: range) -> None:
    try:
        await run.train(steps)
    finally:
        run.queue.cancel_requests()


durations_of_groups = st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.0, 40.0, 90.0]), min_size=1, max_size=40)
times_of_steps = st.lists(st.sampled_from([0.0, 0.5, 3.0, 20.0]), min_size=1, max_size=8)
sizes = st.tuples(st.integers(0, 4), st.integers(1, 4))


def cycle(values: Sequence[float]) -> Callable[..., float]:
    return lambda number, *_: values[number % len(values)]


@settings(max_examples=150, deadline=None)
@given(sizes=sizes, durations=durations_of_groups, times=times_of_steps, step_count=st.integers(1, 12))
def test_no_token_is_older_than_staleness_and_each_prompt_is_trained_once(
    corpus: PromptCorpus, sizes: tuple[int, int], durations: list[float], times: list[float], step_count: int
) -> None:
    staleness, prompts_per_step = sizes
    run = VirtualRun(make_grpo(*sizes), make_loader(corpus), cycle(durations), cycle(times))
    run_virtually(train_and_stop(run, range(step_count)))
    assert max(run.oldest_ages) <= staleness
    assert run.most_pending <= (staleness + 1) * prompts_per_step
    assert all(len(numbers) == prompts_per_step for numbers in run.trained.values())
    assert all(numbers == sorted(numbers) for numbers in run.trained.values())
    trained_numbers = [number for numbers in run.trained.values() for number in numbers]
    assert len(set(trained_numbers)) == len(trained_numbers)
    # Nothing is skipped: a prompt that was drawn and not trained on is still pending, and none was asked for twice.
    assert sorted([*trained_numbers, *_pending_numbers(run.queue.list_contents())]) == sorted(
        number for number, _ in run.asked
    )
    assert sorted(number for number, _ in run.asked) == list(range(len(run.asked)))


def _pending_numbers(contents: QueueContents) -> list[int]:
    return [group.number for group in contents.finished] + [prompt.number for prompt in contents.unfinished]


# Steps that are done, the place in the prompts, and the groups that no step has taken.
Save = tuple[int, Mapping[str, Any], QueueContents]


async def train_until_killed(run: VirtualRun, steps: range, seconds: float, save_every: int) -> list[Save]:
    saves: list[Save] = []
    try:
        async with asyncio.timeout(seconds):
            for step in steps:
                await run.train(range(step, step + 1))
                if (step + 1) % save_every == 0:
                    saves.append((step + 1, run.loader.state_dict(), run.queue.list_contents()))
    except TimeoutError:
        pass
    finally:
        run.queue.cancel_requests()
    return saves


@settings(max_examples=100, deadline=None)
@given(
    sizes=sizes,
    durations=durations_of_groups,
    times=times_of_steps,
    kills=st.lists(st.tuples(st.floats(0.0, 150.0), st.integers(1, 4)), min_size=1, max_size=5),
)
def test_a_kill_at_any_moment_loses_and_repeats_no_prompt(
    corpus: PromptCorpus,
    sizes: tuple[int, int],
    durations: list[float],
    times: list[float],
    kills: list[tuple[float, int]],
) -> None:
    step_count, trained = 10, dict[int, list[int]]()
    saves: list[Save] = [(0, make_loader(corpus).state_dict(), QueueContents())]
    for seconds, save_every in [*kills, (1e6, 1)]:
        run = VirtualRun(make_grpo(*sizes), make_loader(corpus), cycle(durations), cycle(times))
        done, cursor, contents = saves[-1]
        run.loader.load_state_dict(json.loads(json.dumps(cursor)))
        run.queue.restore_contents(contents, done)
        assert sorted(_pending_numbers(run.queue.list_contents())) == sorted(_pending_numbers(contents))
        saves += run_virtually(train_until_killed(run, range(done, step_count), seconds, save_every))
        assert max(run.oldest_ages, default=0) <= sizes[0]
        # What was trained on behind the last save is forgotten with the weights.
        trained = {step: numbers for step, numbers in (trained | run.trained).items() if step < saves[-1][0]}
    trained_numbers = [number for numbers in trained.values() for number in numbers]
    assert len(trained) == step_count
    expected = sorted([*trained_numbers, *_pending_numbers(saves[-1][2])])
    assert expected == list(range(len(expected)))


@pytest.mark.parametrize("staleness", [1, 4])
def test_an_engine_that_is_never_behind_gives_the_steps_of_staleness_0(corpus: PromptCorpus, staleness: int) -> None:
    def rewards(number: int) -> Sequence[float]:
        return (1.0, 1.0) if number % 3 == 0 else (float("nan"), 0.0) if number % 7 == 0 else (1.0, 0.0)

    runs = []
    for each in (0, staleness):
        grpo = make_grpo(each, 3, dynamicSampling={"overSampling": 2})
        runs.append(VirtualRun(grpo, make_loader(corpus), lambda *_: 0.0, rewards=rewards))
        run_virtually(train_and_stop(runs[-1], range(8)))
    assert runs[0].trained == runs[1].trained
    assert runs[0].left_out == runs[1].left_out
    assert sum(map(len, runs[0].left_out.values())) > 8


def test_long_answers_are_trained_on_as_often_as_short_ones(corpus: PromptCorpus) -> None:
    seconds = np.random.default_rng(1).lognormal(1.0, 1.2, 2000).clip(0.1, 90)
    run = VirtualRun(make_grpo(4, 4), make_loader(corpus), cycle(seconds.tolist()))
    run_virtually(train_and_stop(run, range(200)))
    trained_numbers = [number for numbers in run.trained.values() for number in numbers]
    first_untrained = min(_pending_numbers(run.queue.list_contents()))
    # Up to the oldest that is pending every prompt was trained on; the few behind it are answered fast.
    assert set(range(first_untrained)) <= set(trained_numbers)
    assert len(trained_numbers) - first_untrained <= 4 * 4
    assert run.asked_again == 0


def test_steps_take_later_groups_while_a_long_one_is_in_time(corpus: PromptCorpus) -> None:
    # Group 0 takes as long as two steps; staleness 2 lets them learn from others meanwhile.
    run = VirtualRun(make_grpo(2, 1), make_loader(corpus), lambda number, _: 25.0 if number == 0 else 1.0, lambda _: 10)
    run_virtually(train_and_stop(run, range(4)))
    assert run.trained == {0: [1], 1: [2], 2: [0], 3: [3]}


def test_a_run_goes_on_beside_an_answer_that_never_ends(corpus: PromptCorpus) -> None:
    run = VirtualRun(
        make_grpo(1, 2), make_loader(corpus), lambda number, attempt: ENDLESS if number == 1 and attempt < 3 else 1.0
    )
    run_virtually(train_and_stop(run, range(12)))
    assert [attempt for number, attempt in run.asked if number == 1] == [0, 1, 2, 3]
    trained_numbers = [number for numbers in run.trained.values() for number in numbers]
    # It was asked again until it ended, and was never skipped.
    assert trained_numbers.count(1) == 1
    assert run.asked_again == 3


def test_a_prompt_that_never_ends_ends_a_run_that_cannot_go_on_without_it(corpus: PromptCorpus) -> None:
    run = VirtualRun(make_grpo(0, 2), make_loader(corpus), lambda number, _: ENDLESS if number == 1 else 1.0)
    with pytest.raises(GroupTimeout, match=r"step 1 needs prompt 1, whose 2 answers .* more than 100 s 5 times"):
        run_virtually(train_and_stop(run, range(2)))


def test_an_answer_that_nobody_waits_for_may_take_its_time(corpus: PromptCorpus) -> None:
    def durations(number: int, _: int) -> float:
        return TIMEOUT * 1.5 if number == 0 else 1.0

    run = VirtualRun(make_grpo(4, 2), make_loader(corpus), durations, lambda _: 50.0)
    run_virtually(train_and_stop(run, range(5)))
    assert run.asked_again == 0
    assert 0 in run.trained[3]


def test_a_token_that_is_too_old_is_refused(corpus: PromptCorpus) -> None:
    run = VirtualRun(make_grpo(1, 1), make_loader(corpus), lambda *_: 1.0)

    async def lie() -> None:
        await run.train(range(3))
        run.version = -5
        await run.queue.take_groups(3)
        await run.queue.take_groups(4)

    with pytest.raises(ValueError, match=r"has a token of version -5, and .* allows none before 3"):
        run_virtually(lie())


def test_what_fails_while_the_ranks_learn_ends_the_next_step(corpus: PromptCorpus) -> None:
    def durations(number: int, _: int) -> float:
        if number == 3:
            raise RuntimeError("the reward has gone")
        return 1.0

    run = VirtualRun(make_grpo(1, 2), make_loader(corpus), durations)
    with pytest.raises(RuntimeError, match="the reward has gone"):
        run_virtually(train_and_stop(run, range(3)))


def test_groups_of_a_run_with_more_staleness_are_asked_again_where_they_are_too_old(corpus: PromptCorpus) -> None:
    whole = VirtualRun(make_grpo(4, 2), make_loader(corpus), lambda *_: 0.0)
    run_virtually(train_and_stop(whole, range(2)))
    contents = whole.queue.list_contents()
    assert len(contents.finished) == 8
    less = VirtualRun(make_grpo(1, 2), whole.loader, lambda *_: 0.0)
    less.queue.restore_contents(contents, 2)
    run_virtually(train_and_stop(less, range(2, 7)))
    assert max(less.oldest_ages) <= 1
    numbers = [number for each in (whole, less) for numbers in each.trained.values() for number in numbers]
    assert sorted([*numbers, *_pending_numbers(less.queue.list_contents())]) == list(range(len(numbers) + 2))
