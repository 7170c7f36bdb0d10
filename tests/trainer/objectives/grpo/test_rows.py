"""Groups of any size and rollouts of several rows: losses and gradients beside a reckoning that knows no arrays."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from engines import ROOT
from moejob_api.job.grpo import AdvantageEstimator, Grpo, LossAggregation
from moejob_trainer.data.packing import BatchPlan, build_rank_batch
from moejob_trainer.data.prompt_loader import NumberedPrompt
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.objectives.grpo.advantages import compute_advantages
from moejob_trainer.objectives.grpo.loss import grpo_loss
from moejob_trainer.objectives.grpo.objective import batch_arrays
from moejob_trainer.objectives.grpo.rollout_batch import (
    Author,
    Rollout,
    RolloutBatch,
    RolloutRow,
    TokenSpan,
    build_documents,
    build_loss_inputs,
    build_rollout_batch,
    build_rollout_share,
    compute_token_advantages,
    plan_updates,
)
from moejob_trainer.objectives.grpo.sampling import AnswerGroup, SampledGroups, ScoredAnswer
from moejob_trainer.objectives.grpo.step_metrics import reward_metrics
from moejob_trainer.objectives.grpo.step_record import ComputedStep, step_arrays
from moejob_trainer.rewards.scorer import CompletionScore
from moejob_trainer.rollouts.interface import Answer, FinishReason, GenerationRequest
from moejob_trainer.training import Document, TokenOutputs
from moejob_trainer.training.micro_batch import ROUTING, Array
from trainer.objectives.grpo.rows_reference import (
    EPISODES,
    GROUP_OF,
    ROW_OF,
    Numbers,
    Settings,
    draw_numbers,
    reckon_advantages,
    reckon_gradients,
)
from trainer.training_data import total_loss_weight

PLANS = {
    "one micro batch": BatchPlan(data=1, tokens=1000),
    "many micro batches": BatchPlan(data=1, tokens=9),
    "two ranks": BatchPlan(data=2, tokens=9),
    "three ranks, padding": BatchPlan(data=3, tokens=32, packing=False, documents=2, multiple=4),
}
AUTHORS = {"p": Author.PROMPT, "m": Author.MODEL}
CASES = [*product(LossAggregation, AdvantageEstimator)]
SEED = (7, 1)


@dataclass(frozen=True)
class Trainer:
    """The functions that a mistake replaces."""

    advantages: Callable[..., Any] = compute_token_advantages
    documents: Callable[..., Any] = build_documents


def _settings(case: tuple[LossAggregation, AdvantageEstimator], level: str = "Token") -> Settings:
    aggregation, advantage = case
    return Settings(advantage=advantage.value, aggregation=aggregation.value, level=level)


def _grpo(settings: Settings) -> Grpo:
    written = {
        # As a job has it; groups of a step may have other sizes.
        "groupSize": 2,
        "promptsPerStep": 5,
        "epochsPerStep": 2,
        "maxNewTokens": settings.most,
        "advantage": settings.advantage,
        "lossAggregation": settings.aggregation,
        "importance": settings.level,
        "clipLow": settings.clip_low,
        "clipHigh": settings.clip_high,
        "mismatch": {"level": settings.level, "maximum": settings.maximum},
        "kl": {"kind": "K1", "coefficient": settings.coefficient, "applyTo": "Reward"},
        "overlong": {"filter": settings.is_filtered},
        "rewards": [{"name": "math"}],
    }
    return Grpo.model_validate_json(json.dumps(written))


def _row(authors: str, engine: Array, routing: Array | None = None) -> RolloutRow:
    said, spans = iter(engine.tolist()), []
    for author in authors:
        log_probability = np.array([next(said) if author == "m" else np.nan], np.float32)
        spans.append(TokenSpan(AUTHORS[author], np.array([5], np.int32), log_probability, np.zeros(1, np.int32)))
    return RolloutRow(tuple(spans), routing)


def _batch(numbers: Numbers) -> RolloutBatch:
    rollouts = [
        Rollout(
            tuple(
                _row(authors, said.numpy())
                for authors, said in zip(episode.rows, numbers.of("engine", number), strict=True)
            ),
            # Prompts have any number in the run.
            group=40 - GROUP_OF[number],
            is_truncated=episode.is_truncated,
        )
        for number, episode in enumerate(EPISODES)
    ]
    return build_rollout_batch(rollouts, [episode.reward for episode in EPISODES])


def _of_all_tokens(batch: RolloutBatch, numbers: Numbers, name: str) -> Array:
    """Numbers as arrays of a step; in prompts they are none that a loss could use."""
    values = np.full(len(batch.tokens), np.nan, np.float32)
    values[batch.mask > 0] = torch.cat([*numbers.rows[name]]).detach().numpy()
    return values


def _documents(settings: Settings, members: Sequence[int], numbers: Numbers, made: Trainer) -> list[Document]:
    grpo, batch = _grpo(settings), _batch(numbers)
    old, reference, new = (_of_all_tokens(batch, numbers, name) for name in ("old", "reference", "new"))
    advantages = made.advantages(grpo, batch, old, reference)
    extras = build_loss_inputs(batch, advantages, old, reference) | {"new": new}
    documents: list[Document] = made.documents(grpo, batch, members, extras)
    return documents


def _update(
    settings: Settings, members: Sequence[int], numbers: Numbers, plan: BatchPlan, made: Trainer
) -> tuple[float, list[Array]]:
    """Return the loss of an update over all ranks, and its gradient as the reckoning has it."""
    documents = _documents(settings, members, numbers, made)
    weight, loss = total_loss_weight(documents), 0.0
    gradients = [np.zeros(authors.count("m")) for episode in EPISODES for authors in episode.rows]
    for rank in range(plan.data):
        for batch in build_rank_batch(documents, plan, rank):
            new = batch.extras["new"].double().requires_grad_()
            terms = grpo_loss(_grpo(settings), TokenOutputs(new, torch.zeros_like(new)), batch)
            (terms.total / weight).backward()
            loss += float(terms.total.detach()) / weight
            assert new.grad is not None
            for start, length, place in zip(batch.cu_lengths.tolist(), batch.lengths, batch.documents, strict=False):
                if length:
                    row = documents[place].id
                    rollout, number = ROW_OF[row]
                    is_written = np.array([author == "m" for author in EPISODES[rollout].rows[number]])[1:]
                    gradients[row] += new.grad[start : start + length - 1].numpy()[is_written]
    return loss, gradients


def _check(settings: Settings, plan: BatchPlan, made: Trainer = Trainer(), expected: Settings | None = None) -> None:
    numbers = draw_numbers(3)
    updates = plan_updates(np.array(GROUP_OF), _grpo(settings), 2, SEED)
    assert len(updates) == 4
    for members in updates:
        loss, gradients = _update(settings, members, numbers, plan, made)
        expected_loss, expected_gradients = reckon_gradients(expected or settings, numbers, members)
        # Advantages and weights travel as float32.
        assert loss == pytest.approx(expected_loss, rel=2e-6, abs=1e-6)
        assert np.abs(np.concatenate(expected_gradients)).max() > 1e-2
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["Token", "Sequence"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_losses_and_gradients_are_those_reckoned_rollout_by_rollout(
    case: tuple[LossAggregation, AdvantageEstimator], plan: str, level: str
) -> None:
    _check(_settings(case, level), PLANS[plan])


def _by_row(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch with a rollout for each row."""
    owners = batch.rollout_of_row
    return replace(
        batch,
        rollout_of_row=np.arange(len(owners), dtype=np.int32),
        group_of_rollout=batch.group_of_rollout[owners],
        truncated=batch.truncated[owners],
        rewards=batch.rewards[owners],
    )


def _of_one_size(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, group_of_rollout=np.arange(len(batch.rewards), dtype=np.int32) // 2)


def _filter_last_rows(grpo: Grpo, batch: RolloutBatch, members: Sequence[int], extras: Any) -> list[Document]:
    documents = build_documents(grpo, replace(batch, truncated=0 * batch.truncated), members, extras)
    last_rows = {batch.rows_of_rollouts([number])[-1] for number in members if batch.truncated[number]}
    return [replace(each, weights=each.weights * 0) if each.id in last_rows else each for each in documents]


ALL = frozenset(CASES)
# Mistakes, and the cases whose numbers they change.
MISTAKES: dict[str, tuple[Trainer, frozenset[tuple[LossAggregation, AdvantageEstimator]]]] = {
    "advantages of rows": (
        Trainer(advantages=lambda grpo, batch, *numbers: compute_token_advantages(grpo, _by_row(batch), *numbers)),
        ALL,
    ),
    "a filter of rows": (Trainer(documents=_filter_last_rows), ALL),
    "means of rows": (
        Trainer(
            documents=lambda grpo, batch, members, extras: build_documents(
                grpo, _by_row(batch), batch.rows_of_rollouts(members), extras
            )
        ),
        frozenset(case for case in CASES if case[0] in (LossAggregation.SEQUENCE, LossAggregation.CONSTANT)),
    ),
    "advantages in groups of one size": (
        Trainer(advantages=lambda grpo, batch, *numbers: compute_token_advantages(grpo, _of_one_size(batch), *numbers)),
        frozenset(case for case in CASES if case[1] is not AdvantageEstimator.REINFORCE_PLUS_PLUS),
    ),
    "means of groups of one size": (
        Trainer(documents=lambda grpo, batch, *rest: build_documents(grpo, _of_one_size(batch), *rest)),
        frozenset(case for case in CASES if case[0] is LossAggregation.GROUP),
    ),
    "updates of the first row of each rollout": (
        Trainer(
            documents=lambda grpo, batch, members, extras: [
                each for each in build_documents(grpo, batch, members, extras) if ROW_OF[each.id][1] == 0
            ]
        ),
        ALL,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_mistake_is_seen_where_it_changes_something(
    case: tuple[LossAggregation, AdvantageEstimator], mistake: str
) -> None:
    made, changed_cases = MISTAKES[mistake]
    if case not in changed_cases:
        # The rows of a rollout make no difference to this case's weights, nor groups to its advantages.
        _check(_settings(case), PLANS["two ranks"], made)
        return
    with pytest.raises(AssertionError):
        _check(_settings(case), PLANS["two ranks"], made)


def test_a_ratio_of_sequences_is_that_of_one_row() -> None:
    settings = _settings((LossAggregation.SEQUENCE, AdvantageEstimator.GRPO), "Sequence")
    with pytest.raises(AssertionError):
        _check(settings, PLANS["two ranks"], expected=replace(settings, ratio_of="rollout"))


@pytest.mark.parametrize("aggregation", LossAggregation)
def test_an_epoch_has_every_rollout_once_in_parts_of_equal_size(aggregation: LossAggregation) -> None:
    grpo = _grpo(_settings((aggregation, AdvantageEstimator.GRPO)))
    parts = plan_updates(np.array(GROUP_OF), grpo, 2, SEED)
    for epoch in (parts[:2], parts[2:]):
        assert sorted(number for part in epoch for number in part) == [*range(len(EPISODES))]
        groups = [[GROUP_OF[number] for number in part] for part in epoch]
        if aggregation is LossAggregation.GROUP:
            # Two groups each, whatever their sizes, and none in both.
            assert [len({*of_part}) for of_part in groups] == [2, 2]
            assert not {*groups[0]} & {*groups[1]}
        else:
            assert [len(part) for part in epoch] == [5, 5]
    assert parts[:2] != parts[2:]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (AdvantageEstimator.GRPO, [0.0, 0.5 / (0.5 + 1e-4), 0.0, -0.5 / (0.5 + 1e-4)]),
        (AdvantageEstimator.DR_GRPO, [0.0, 0.5, 0.0, -0.5]),
        (AdvantageEstimator.RLOO, [0.0, 0.75, 0.0, -0.75]),
    ],
)
def test_a_rollout_alone_in_its_group_is_neither_better_nor_worse(
    advantage: AdvantageEstimator, expected: list[float]
) -> None:
    # The other three have 1, 1/2 and 0: mean 1/2, deviation of a sample 1/2.
    rewards, groups = np.array([9.0, 1.0, 0.5, 0.0]), np.array([0, 1, 1, 1])
    values = compute_advantages(advantage, rewards, groups, [np.zeros(1)] * 4)
    assert np.concatenate(values).tolist() == pytest.approx(expected, abs=1e-12)


def test_advantages_are_of_every_token_that_the_model_wrote_in_the_rows_of_a_rollout() -> None:
    numbers = draw_numbers(5)
    batch = _batch(numbers)
    for case in CASES:
        settings = _settings(case)
        old, reference = (_of_all_tokens(batch, numbers, name) for name in ("old", "reference"))
        values = compute_token_advantages(_grpo(settings), batch, old, reference)
        for number, (rows, expected) in enumerate(zip(values, reckon_advantages(settings, numbers), strict=True)):
            is_written = np.array([author == "m" for authors in EPISODES[number].rows for author in authors])
            np.testing.assert_allclose(rows[is_written], np.concatenate(expected), rtol=1e-6, atol=1e-6)
            assert not rows[~is_written].any()


def test_log_probabilities_of_ranks_lie_where_their_rows_do() -> None:
    batch, plan = _batch(draw_numbers(1)), PLANS["two ranks"]
    whole = np.zeros(len(batch.tokens))
    for rank in range(plan.data):
        share = build_rollout_share(batch, plan, rank)
        outputs = []
        for micro_batch in share.batches:
            values = torch.zeros(len(micro_batch.tokens))
            for start, length, row in zip(
                micro_batch.cu_lengths.tolist(), micro_batch.lengths, micro_batch.documents, strict=False
            ):
                if length:
                    # About the labels: each token but the first, by its row and its place there.
                    values[start : start + length - 1] = 100.0 * (row + 1) + torch.arange(1, length)
            outputs.append(TokenOutputs(values, torch.zeros_like(values)))
        whole += share.gather_log_probabilities(outputs).numpy()
    expected = [
        100 * (row + 1) + place if place else 0
        for row, (rollout, number) in enumerate(ROW_OF)
        for place in range(len(EPISODES[rollout].rows[number]))
    ]
    assert whole.tolist() == expected


def test_the_arrays_of_a_batch_make_it_again_on_every_rank() -> None:
    batch = _batch(draw_numbers(1))
    # Asked before it travels, it still sends its fields alone.
    assert batch.rows_of_rollouts([1, 3]) == [1, 2, 4, 5, 6]
    again = RolloutBatch(**batch_arrays(batch))
    assert again.rows_of_rollouts([1, 3]) == [1, 2, 4, 5, 6]
    assert [len(part) for part in again.split_by_rollout(again.tokens)] == [
        sum(map(len, episode.rows)) for episode in EPISODES
    ]


def test_the_last_token_of_each_row_routes_by_itself() -> None:
    def routing(length: int) -> Array:
        return np.arange(1, length, dtype=np.uint8)[:, None, None]

    rollouts = [
        Rollout(tuple(_row(authors, np.zeros(9), routing(len(authors))) for authors in rows), 0, is_truncated=False)
        for rows in (("pm", "ppmm"), ("pmm",))
    ]
    batch = build_rollout_batch(rollouts, [0.0, 1.0])
    assert [each[ROUTING].flatten().tolist() for each in batch.row_inputs()] == [[2, 0], [2, 3, 4, 0], [2, 3, 0]]
    lacking = replace(rollouts[0], rows=(rollouts[0].rows[0], replace(rollouts[0].rows[1], routing=None)))
    with pytest.raises(ValueError, match="2 of 3 rows carry a routing"):
        build_rollout_batch([lacking, rollouts[1]], [0.0, 1.0])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param((), "no token of the model in its 0 rows", id="without rows"),
        pytest.param(("pp", "p"), "no token of the model in its 2 rows", id="nothing written"),
        pytest.param(("pm", "mp"), "begins with a token of the model", id="without a prompt"),
    ],
)
def test_a_rollout_from_which_nothing_can_be_learned_is_refused(rows: tuple[str, ...], message: str) -> None:
    rollout = Rollout(tuple(_row(authors, np.zeros(9)) for authors in rows), 3, is_truncated=False)
    with pytest.raises(ValueError, match=message):
        build_rollout_batch([rollout], [1.0])


def test_groups_that_do_not_lie_together_are_refused() -> None:
    rollouts = [Rollout((_row("pm", np.zeros(1)),), group, is_truncated=False) for group in (4, 5, 4)]
    with pytest.raises(ValueError, match=r"do not lie together.*\[4, 5, 4\]"):
        build_rollout_batch(rollouts, [0.0, 1.0, 2.0])


@pytest.mark.parametrize("kind", AdvantageEstimator)
def test_the_script_that_computes_a_step_again_compares_groups_of_any_size(kind: AdvantageEstimator) -> None:
    script = runpy.run_path(str(ROOT / "examples/recompute_step.py"))
    rewards = np.array([episode.reward for episode in EPISODES])
    lengths = [1 + number % 3 for number in range(len(rewards))]
    answers = [
        script["Answer"](group, none, torch.zeros(length), none, reward, False, none, None, None)
        for none in (torch.zeros(0),)
        for group, length, reward in zip(GROUP_OF, lengths, rewards.tolist(), strict=True)
    ]
    settings = {"grpo": {"advantage": kind.value, "groupSize": 2, "kl": {"applyTo": "Loss"}}}
    computed = script["compute_advantages"](script["Step"](settings, answers, [], []), [], None)
    expected = compute_advantages(kind, rewards, np.array(GROUP_OF), [np.zeros(length) for length in lengths])
    assert torch.cat(computed).tolist() == pytest.approx(np.concatenate(expected).tolist(), rel=1e-12, abs=1e-12)


def test_a_step_of_rollouts_with_several_rows_is_not_recorded_as_if_it_had_one_of_each() -> None:
    batch = _batch(draw_numbers(1))
    with pytest.raises(ValueError, match="16 rows in 10 rollouts"):
        step_arrays(SampledGroups(()), ComputedStep(batch, [], None, None), [])


def test_rewards_of_groups_of_any_size_are_measured_over_all_rollouts() -> None:
    def answered(group: int, rewards: Sequence[float]) -> AnswerGroup:
        prompt, one = np.array([3], np.int32), np.ones(1, np.int32)
        answers = (
            Answer(GenerationRequest(group, member, prompt, 0), one, np.zeros(1, np.float32), one, FinishReason.STOP)
            for member in range(len(rewards))
        )
        scored = (
            ScoredAnswer(answer, "", CompletionScore(reward, {"math": reward}), reward, 0.0)
            for answer, reward in zip(answers, rewards, strict=True)
        )
        return AnswerGroup(NumberedPrompt(group, Prompt((3,), "", {}, "")), tuple(scored))

    groups = (answered(0, [1.0, 0.0, 0.0]), answered(1, [1.0, 1.0]), answered(2, [3.0]))
    metrics = reward_metrics(SampledGroups(groups), ["math"])
    assert metrics["reward"] == metrics["reward/math"] == 1.0
    assert metrics["rewardStd"] == 1.0
    # Equal rewards, and a rollout alone.
    assert (metrics["groups"], metrics["groupsWithoutSignal"]) == (3, 2)
