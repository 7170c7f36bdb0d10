"""The worked step in the docstring of the objective: computed by its functions, each number found in the text."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from moejob_api.job.grpo import BuiltInReward, Grpo, LossAggregation, Reward
from moejob_trainer.data.packing import BatchPlan, build_rank_batch
from moejob_trainer.objectives.grpo import objective, rollout_batch
from moejob_trainer.objectives.grpo.advantages import EPSILON
from moejob_trainer.objectives.grpo.loss import Clipping, grpo_loss, policy_loss
from moejob_trainer.objectives.grpo.rollout_batch import build_rollout
from moejob_trainer.objectives.grpo.sampling import has_signal
from moejob_trainer.rollouts.interface import Answer, FinishReason, GenerationRequest
from moejob_trainer.training import LossTerms, TokenOutputs
from trainer.training_data import total_loss_weight

PROMPT_TOKENS, ANSWER_TOKENS = (3, 2), ((2, 1, 2), (1, 1, 1))
REWARDS = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
RATIOS = (1.5, 1.1, 0.7, 0.9, 1.3)
PLAN = BatchPlan(data=1, tokens=64)
OLD_LOG_PROBABILITY = -0.5


def _settings(aggregation: LossAggregation = LossAggregation.TOKEN) -> Grpo:
    return Grpo(
        prompts_per_step=2,
        group_size=3,
        epochs_per_step=2,
        loss_aggregation=aggregation,
        rewards=(Reward(name=BuiltInReward.NUMERIC),),
    )


def _experience() -> rollout_batch.RolloutBatch:
    answers = [
        Answer(
            GenerationRequest(group, member, np.arange(2, 2 + PROMPT_TOKENS[group], dtype=np.int32), 0),
            np.full(length, 9, np.int32),
            np.full(length, OLD_LOG_PROBABILITY, np.float32),
            np.zeros(length, np.int32),
            FinishReason.STOP,
        )
        for group, lengths in enumerate(ANSWER_TOKENS)
        for member, length in enumerate(lengths)
    ]
    return rollout_batch.build_rollout_batch([build_rollout(answer) for answer in answers], REWARDS.flatten().tolist())


def _update(grpo: Grpo, epoch: int, ratios: tuple[float, ...]) -> tuple[LossTerms, float]:
    """Return the loss of an epoch's update and its weight; the first group's tokens have these ratios."""
    step = _experience()
    old = np.full(len(step.tokens), OLD_LOG_PROBABILITY, np.float32)
    extras = rollout_batch.build_loss_inputs(
        step, rollout_batch.compute_token_advantages(grpo, step, old, None), old, None
    )
    members = rollout_batch.plan_updates(step.group_of_rollout, grpo, 1, (0, 0))[epoch]
    documents = rollout_batch.build_documents(grpo, step, members, extras)
    (batch,) = build_rank_batch(documents, PLAN, 0)
    starts = {members[place]: start for place, start in zip(batch.documents, batch.cu_lengths.tolist(), strict=False)}
    # A position holds the log-probability of its label, the next token: that of an answer begins at the prompt's last.
    first_group = [
        starts[member] + PROMPT_TOKENS[0] - 1 + token
        for member, length in enumerate(ANSWER_TOKENS[0])
        for token in range(length)
    ]
    new = torch.full((len(batch.tokens),), OLD_LOG_PROBABILITY)
    new[first_group] += torch.tensor(ratios).log()
    return grpo_loss(grpo, TokenOutputs(new, torch.zeros_like(new)), batch), total_loss_weight(documents)


def _token_losses(ratios: tuple[float, ...]) -> list[float]:
    """Return the loss of each token of the first group."""
    grpo, step = _settings(), _experience()
    advantages = np.concatenate(rollout_batch.compute_token_advantages(grpo, step, None, None)[:3])
    of_answers = torch.from_numpy(advantages[advantages != 0]).double()
    log_ratios = torch.tensor(ratios).double().log()
    clipping = Clipping(grpo.clip_low, grpo.clip_high)
    losses: list[float] = policy_loss(grpo.policy_loss, log_ratios, log_ratios, of_answers, clipping).tolist()
    return losses


def _numbers(label: str) -> list[list[float]]:
    """Return the numbers behind a label of the docstring, line by line."""
    lines = re.findall(rf"^ +{label} +\[[^]]*\](.*)$", objective.__doc__ or "", re.MULTILINE)
    assert lines, label
    return [[float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", line)] for line in lines]


def test_rollouts_have_the_shapes_of_the_text() -> None:
    step = _experience()
    assert _numbers("answer tokens") == [np.array(ANSWER_TOKENS).flatten().tolist()]
    assert _numbers("lengths") == [step.lengths.tolist()]
    assert len(step.tokens) == len(step.mask) == len(step.engine) == 23
    assert step.mask.sum() == 8


def test_advantages_are_those_of_the_text() -> None:
    step, grpo = _experience(), _settings()
    of_rollouts = rollout_batch.compute_token_advantages(grpo, step, None, None)
    advantages = [values[mask > 0] for values, mask in zip(of_rollouts, step.split_by_rollout(step.mask), strict=True)]
    assert all(np.ptp(values) == 0 for values in advantages)
    assert _numbers("rewards") == [REWARDS.flatten().tolist()]
    assert _numbers("means") == [pytest.approx(REWARDS.mean(1).tolist(), abs=5e-6)]
    assert _numbers("deviations") == [pytest.approx(REWARDS.std(1, ddof=1).tolist(), abs=5e-6)]
    assert _numbers("advantages") == [pytest.approx([float(values[0]) for values in advantages], abs=5e-6)]
    assert EPSILON == 1e-4
    assert has_signal(REWARDS).tolist() == [True, False]


@pytest.mark.parametrize(("epoch", "ratios"), [(0, (1.0,) * 5), (1, RATIOS)], ids=["first epoch", "second epoch"])
def test_losses_are_those_of_the_text(epoch: int, ratios: tuple[float, ...]) -> None:
    terms, weight = _update(_settings(), epoch, ratios)
    tokens, totals = _numbers(("first epoch", "second epoch")[epoch])
    assert _numbers("ratios") == [list(RATIOS)]
    assert tokens == pytest.approx(_token_losses(ratios), abs=6e-6)
    assert totals == pytest.approx([float(terms.total), weight, float(terms.total) / weight], abs=5e-6)
    clipped = [float(terms.metrics[name].total / terms.metrics[name].weight) for name in ("clipLow", "clipHigh")]
    assert clipped == ([0, 0] if epoch == 0 else [1 / 8, 1 / 8])


def test_a_mean_over_sequences_is_the_one_of_the_text() -> None:
    terms, weight = _update(_settings(LossAggregation.SEQUENCE), 1, RATIOS)
    assert weight == pytest.approx(6)
    assert f"{float(terms.total) / weight:.5f} in the second epoch" in (objective.__doc__ or "")


def test_the_text_names_the_file_of_each_part() -> None:
    place = (objective.__doc__ or "").partition("Where each of them is:")[2]
    grpo_folder = Path(objective.__file__).parent
    names = re.findall(r"[\w/]+\.py", place)
    assert len(names) == 11
    roots = (grpo_folder, grpo_folder.parents[1])
    assert [name for name in names if not any((root / name).is_file() for root in roots)] == []
