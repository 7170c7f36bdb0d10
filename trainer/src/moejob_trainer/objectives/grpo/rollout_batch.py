"""The rollouts of a step: rows of tokens, then arrays that every rank has, then the documents of its updates. Pure.

A group has the rollouts of one prompt, which are compared with one another; a rollout is one attempt with one reward; a
row is a text that the model reads in one pass, and becomes one document. Knows how tokens are laid out, and nothing of
the sampling of rollouts or of their way to other ranks. Arrays lie one row after another, rows of a rollout and
rollouts of a group together. Of two groups, of prompts p and r, rollout 1 is an episode of two rows, the second of
which repeats the first before a question q of the environment:

    tokens            p a b | p c | p c q d e | r f | r g
    mask              0 1 1 | 0 1 | 0 0 0 1 1 | 0 1 | 0 1        c is learned from once
    lengths           3       2     5           2     2
    rollout_of_row    0       1     1           2     3
    group_of_rollout  0 0 1 1                                    rewards and truncated: one for each rollout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from moejob_api.job.grpo import Grpo, KlTarget, LossAggregation
from moejob_trainer.data.packing import BatchPlan, build_rank_batch
from moejob_trainer.distributed.encoding import Array
from moejob_trainer.objectives.grpo.advantages import compute_advantages
from moejob_trainer.objectives.grpo.loss import (
    ADVANTAGE,
    ENGINE,
    OLD,
    REFERENCE,
    SCALE,
    compute_token_weights,
    estimate_kl,
)
from moejob_trainer.rollouts.interface import Answer, FinishReason, Floats, Tokens
from moejob_trainer.training import Document, MicroBatch, TokenOutputs
from moejob_trainer.training.micro_batch import ROUTING


class Author(StrEnum):
    """The author of a span."""

    PROMPT = "Prompt"
    MODEL = "Model"


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpan:
    """Tokens of one author, with the engine's log-probability of each and the version that chose it. [N]"""

    author: Author
    tokens: Tokens
    log_probabilities: Floats
    versions: Tokens


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRow:
    """The spans of a text that the model reads in one pass. Training learns from the model's spans only."""

    spans: tuple[TokenSpan, ...]
    # Experts of each token but the last one, which the engine sampled and never read. [N - 1, routed layers, k]
    routing: Array | None = None

    @property
    def tokens(self) -> Tokens:
        """Return the tokens of all spans. [N]"""
        return np.concatenate([span.tokens for span in self.spans])

    @property
    def mask(self) -> Tokens:
        """Return 1 for each token that the model wrote. [N]"""
        return np.concatenate([np.full(len(span.tokens), span.author is Author.MODEL, np.int32) for span in self.spans])

    @property
    def log_probabilities(self) -> Floats:
        """Return the engine's log-probabilities. [N]"""
        return np.concatenate([span.log_probabilities for span in self.spans])


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """The rows of one attempt at a prompt, in their order; truncated where it reached maxNewTokens before its end.

    Today it is one prompt and one answer, which are one row. A token that the model wrote is in a span of the model in
    one row only, however many rows repeat it.
    """

    rows: tuple[RolloutRow, ...]
    # The number of the prompt in the run.
    group: int
    is_truncated: bool


def build_rollout(answer: Answer) -> Rollout:
    """Return the rollout of one prompt and its answer."""
    prompt = answer.request.prompt
    prompt_span = TokenSpan(
        Author.PROMPT, prompt, np.zeros(len(prompt), np.float32), np.full(len(prompt), -1, np.int32)
    )
    answer_span = TokenSpan(Author.MODEL, answer.tokens, answer.log_probabilities, answer.versions)
    row = RolloutRow((prompt_span, answer_span), answer.routing)
    return Rollout((row,), answer.request.group, answer.finish_reason is FinishReason.LENGTH)


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts that a step trains on: R rollouts of N rows, T tokens in all."""

    # Of all rows one after another: tokens int32, 1 where the model wrote, the engine's log-probabilities float32. [T]
    tokens: Array
    mask: Array
    engine: Array
    # Of each row: its tokens, and its rollout, which is a place in the arrays below. int32 [N]
    lengths: Array
    rollout_of_row: Array
    # Of each rollout: its group, by its place in the step, and whether it has no end, both int32; its reward, float64.
    # All are [R].
    group_of_rollout: Array
    truncated: Array
    rewards: Array
    # The experts that engines chose, where they are replayed, as ROUTING of a micro batch. [T, routed layers, k]
    routing: Array | None = None

    @cached_property
    def row_starts(self) -> Array:
        """Return the first position of each row. [N]"""
        return np.concatenate([[0], self.lengths.cumsum()[:-1]])

    @cached_property
    def first_rows(self) -> Array:
        """Return the first row of each rollout. [R]"""
        return np.searchsorted(self.rollout_of_row, np.arange(len(self.rewards)))

    def split_by_row(self, values: Array) -> list[Array]:
        """Return the part of each row. [T] -> N times [tokens of the row]"""
        return np.split(values, self.row_starts[1:])

    def split_by_rollout(self, values: Array) -> list[Array]:
        """Return the part of each rollout, of all its rows. [T] -> R times [tokens of the rollout]"""
        return np.split(values, self.row_starts[self.first_rows[1:]])

    def rows_of_rollouts(self, rollouts: Sequence[int]) -> list[int]:
        """Return the rows of some rollouts, in the order of these."""
        ends = [*self.first_rows[1:].tolist(), len(self.lengths)]
        return [row for rollout in rollouts for row in range(int(self.first_rows[rollout]), ends[rollout])]

    def row_inputs(self) -> list[Mapping[str, Array]]:
        """Return the inputs of each row beside its tokens."""
        if self.routing is None:
            return [{}] * len(self.lengths)
        return [{ROUTING: part} for part in self.split_by_row(self.routing)]

    def split_answers(self, values: Array) -> list[Array]:
        """Return the part of each rollout that the model wrote. [T] -> R times [tokens that the model wrote]"""
        return [
            part[mask > 0]
            for part, mask in zip(self.split_by_rollout(values), self.split_by_rollout(self.mask), strict=True)
        ]


def build_rollout_batch(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> RolloutBatch:
    """Return rollouts and the reward of each as arrays."""
    _validate_rollouts(rollouts)
    rows = [row for rollout in rollouts for row in rollout.rows]
    return RolloutBatch(
        tokens=np.concatenate([row.tokens for row in rows]).astype(np.int32),
        mask=np.concatenate([row.mask for row in rows]),
        engine=np.concatenate([row.log_probabilities for row in rows]).astype(np.float32),
        lengths=np.array([len(row.tokens) for row in rows], np.int32),
        rollout_of_row=np.repeat(np.arange(len(rollouts), dtype=np.int32), [len(each.rows) for each in rollouts]),
        group_of_rollout=_number_groups(rollouts),
        truncated=np.array([each.is_truncated for each in rollouts], np.int32),
        rewards=np.asarray(rewards, np.float64),
        routing=_batch_routing(rows),
    )


def _validate_rollouts(rollouts: Sequence[Rollout]) -> None:
    """Refuse rollouts with nothing to learn, and tokens that would count without being learned."""
    for number, rollout in enumerate(rollouts):
        masks = [row.mask for row in rollout.rows]
        if not any(mask.any() for mask in masks):
            raise ValueError(
                f"rollout {number}, of group {rollout.group}, has no token of the model in its {len(masks)} rows; "
                "leave it out of the step"
            )
        if any(mask[:1].any() for mask in masks):
            raise ValueError(
                f"rollout {number}, of group {rollout.group}, has a row that begins with a token of the model, which "
                "no token predicts; begin each row with its prompt"
            )


def _number_groups(rollouts: Sequence[Rollout]) -> Array:
    """Return the place of each rollout's group. Prompts 7, 7, 4, 4 and 4 are groups 0 0 1 1 1. [R]"""
    prompts = np.array([rollout.group for rollout in rollouts])
    places = np.concatenate([[0], (np.diff(prompts) != 0).cumsum()]).astype(np.int32)
    if places[-1] + 1 > len(np.unique(prompts)):
        raise ValueError(f"the rollouts of a group do not lie together; groups of all rollouts: {prompts.tolist()}")
    return places


def _batch_routing(rows: Sequence[RolloutRow]) -> Array | None:
    routings = [row.routing for row in rows if row.routing is not None]
    if routings and len(routings) < len(rows):
        raise ValueError(f"{len(routings)} of {len(rows)} rows carry a routing to replay; all or none must")
    return _routing_inputs(routings) if routings else None


def _routing_inputs(routings: Sequence[Array]) -> Array:
    """Return routings as inputs; the last token of each row, which no engine has read, routes by itself."""
    first = routings[0]
    inputs = np.zeros((sum(len(routing) + 1 for routing in routings), *first.shape[1:]), first.dtype)
    end = 0
    for each in routings:
        np.add(each, 1, out=inputs[end : end + len(each)])
        end += len(each) + 1
    return inputs


def compute_token_advantages(
    grpo: Grpo, batch: RolloutBatch, old: Array | None, reference: Array | None
) -> list[Array]:
    """Return the advantage of each token of each rollout, 0 where the model did not write. R times [tokens]"""
    token_rewards = [np.zeros(len(values)) for values in batch.split_answers(batch.engine)]
    if grpo.kl.apply_to is KlTarget.REWARD and old is not None and reference is not None:
        token_rewards = [
            -grpo.kl.coefficient * answer for answer in batch.split_answers(_estimate_token_kl(grpo, old, reference))
        ]
    answer_advantages = compute_advantages(grpo.advantage, batch.rewards, batch.group_of_rollout, token_rewards)
    return [
        _place_answer(answer, mask)
        for answer, mask in zip(answer_advantages, batch.split_by_rollout(batch.mask), strict=True)
    ]


def _estimate_token_kl(grpo: Grpo, old: Array, reference: Array) -> Array:
    estimates: Array = estimate_kl(grpo.kl.kind, torch.from_numpy(old), torch.from_numpy(reference)).numpy()
    return estimates


def _place_answer(answer_values: Array, mask: Array) -> Array:
    values = np.zeros(len(mask), np.float32)
    values[mask > 0] = answer_values
    return values


def build_documents(
    grpo: Grpo, batch: RolloutBatch, members: Sequence[int], extras: Mapping[str, Array]
) -> list[Document]:
    """Return the documents of one update: all rows of the rollouts in `members`.

    `extras` hold all tokens of the step. [T]
    """
    answers = batch.split_answers(batch.mask)
    is_left_out = grpo.overlong.filter * batch.truncated
    answer_lengths = [0 if is_left_out[number] else len(answers[number]) for number in members]
    token_weights = compute_token_weights(
        grpo.loss_aggregation, answer_lengths, batch.group_of_rollout[list(members)].tolist(), grpo.max_new_tokens
    )
    weight_of_rollout = {
        number: weight if length else 0.0
        for number, length, weight in zip(members, answer_lengths, token_weights.tokens, strict=True)
    }
    extra_parts = {name: batch.split_by_row(values) for name, values in extras.items()}
    tokens, masks, inputs = batch.split_by_row(batch.tokens), batch.split_by_row(batch.mask), batch.row_inputs()
    return [
        Document(
            tokens=tokens[row].astype(np.int64),
            weights=(masks[row] * weight_of_rollout[int(batch.rollout_of_row[row])]).astype(np.float32),
            id=row,
            extras={
                **{name: parts[row].astype(np.float32) for name, parts in extra_parts.items()},
                SCALE: np.array(token_weights.scale, np.float32),
            },
            inputs=inputs[row],
        )
        for row in batch.rows_of_rollouts(members)
    ]


def build_loss_inputs(
    batch: RolloutBatch, advantages: Sequence[Array], old: Array | None, reference: Array | None
) -> dict[str, Array]:
    """Return the inputs of the loss: a number for each token of the step. [T]"""
    inputs = {ADVANTAGE: np.concatenate(advantages), ENGINE: batch.engine}
    if old is not None:
        inputs[OLD] = old
    if reference is not None:
        inputs[REFERENCE] = reference
    return inputs


def plan_updates(groups: Array, grpo: Grpo, update_count: int, seed: Sequence[int]) -> list[list[int]]:
    """Return the rollouts of each update of a step, given the group of each rollout [R].

    An epoch is cut into equal numbers of rollouts, groups one after another, in another order in each epoch. Dropped
    groups make parts unequal. With lossAggregation Group, an epoch is cut into equal numbers of groups: their mean
    counts each group once, and the mean of a group needs all its rollouts. A rollout is never divided.
    """
    group_count = int(groups[-1]) + 1
    shuffled = [
        np.random.default_rng([*seed, epoch]).permutation(group_count) for epoch in range(1, grpo.epochs_per_step)
    ]
    members_of_group = np.split(np.arange(len(groups)), np.flatnonzero(np.diff(groups)) + 1)

    def list_members(part: Array) -> Array:
        return np.concatenate([members_of_group[group] for group in part])

    updates: list[list[int]] = []
    for order in [np.arange(group_count), *shuffled]:
        if grpo.loss_aggregation is LossAggregation.GROUP:
            parts = [list_members(part) for part in np.array_split(order, update_count) if len(part)]
        else:
            parts = np.array_split(list_members(order), update_count)
        updates += [part.tolist() for part in parts if len(part)]
    return updates


@dataclass(frozen=True)
class RolloutShare:
    """This data rank's share of all rollouts, for a forward pass without an update."""

    rollouts: RolloutBatch
    batches: Sequence[MicroBatch]

    def gather_log_probabilities(self, outputs: Sequence[TokenOutputs]) -> Tensor:
        """Return the log-probabilities of all tokens of the step, 0 where another rank has the document. [T]"""
        device = outputs[0].log_probabilities.device
        log_probabilities = torch.zeros(len(self.rollouts.tokens), device=device)
        for batch, output in zip(self.batches, outputs, strict=True):
            for start, length, number in zip(batch.cu_lengths.tolist(), batch.lengths, batch.documents, strict=False):
                if length:
                    # The output at position i is about its label, token i + 1.
                    first = int(self.rollouts.row_starts[number]) + 1
                    log_probabilities[first : first + length - 1] = output.log_probabilities[start : start + length - 1]
        return log_probabilities


def build_rollout_share(batch: RolloutBatch, plan: BatchPlan, rank: int) -> RolloutShare:
    """Return the share of a data rank."""
    row_parts = zip(batch.split_by_row(batch.tokens), batch.split_by_row(batch.mask), batch.row_inputs(), strict=True)
    documents = [
        Document(tokens.astype(np.int64), mask.astype(np.float32), row, inputs=inputs)
        for row, (tokens, mask, inputs) in enumerate(row_parts)
    ]
    return RolloutShare(batch, build_rank_batch(documents, plan, rank))
