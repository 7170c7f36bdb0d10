"""The rollouts of a step: spans of tokens, then arrays that every rank has, then the documents of its updates. Pure.

Knows how tokens are laid out, and nothing of the sampling of rollouts or of their way to other ranks. Arrays lie one
rollout after another. Two rollouts of prompts p, q and answers a b, c are

    tokens  p a b q c        lengths 3 2
    mask    0 1 1 0 1        rewards one for each rollout
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
class Rollout:
    """The spans of one conversation; truncated where the last one reached maxNewTokens before its end.

    Training learns from the model's spans only. Today a rollout is one prompt and one answer; with tools or several
    turns it has more spans and nothing else changes.
    """

    spans: tuple[TokenSpan, ...]
    is_truncated: bool
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


def build_rollout(answer: Answer) -> Rollout:
    """Return the rollout of one prompt and its answer."""
    prompt = answer.request.prompt
    prompt_span = TokenSpan(
        Author.PROMPT, prompt, np.zeros(len(prompt), np.float32), np.full(len(prompt), -1, np.int32)
    )
    answer_span = TokenSpan(Author.MODEL, answer.tokens, answer.log_probabilities, answer.versions)
    return Rollout((prompt_span, answer_span), answer.finish_reason is FinishReason.LENGTH, answer.routing)


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts that a step trains on. Groups are complete, and lie one after another."""

    # Of all rollouts in a row: tokens int32, 1 where the model wrote, the engine's log-probabilities float32. [T]
    tokens: Array
    mask: Array
    engine: Array
    # Of each rollout: tokens, whether it has no end, its reward float64. [N]
    lengths: Array
    truncated: Array
    rewards: Array
    # The experts that engines chose, where they are replayed, as ROUTING of a micro batch. [T, routed layers, k]
    routing: Array | None = None

    @cached_property
    def starts(self) -> Array:
        """Return the first position of each rollout. [N]"""
        return np.concatenate([[0], self.lengths.cumsum()[:-1]])

    def split_by_rollout(self, values: Array) -> list[Array]:
        """Return the part of each rollout. [T] -> N times [length]"""
        return np.split(values, self.starts[1:])

    def rollout_inputs(self) -> list[Mapping[str, Array]]:
        """Return the inputs of each rollout beside its tokens."""
        if self.routing is None:
            return [{}] * len(self.lengths)
        return [{ROUTING: part} for part in self.split_by_rollout(self.routing)]

    def split_answers(self, values: Array) -> list[Array]:
        """Return the part of each rollout that the model wrote. [T] -> N times [length of the answer]"""
        return [
            part[mask > 0]
            for part, mask in zip(self.split_by_rollout(values), self.split_by_rollout(self.mask), strict=True)
        ]


def build_rollout_batch(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> RolloutBatch:
    """Return rollouts as arrays."""
    return RolloutBatch(
        tokens=np.concatenate([rollout.tokens for rollout in rollouts]).astype(np.int32),
        mask=np.concatenate([each.mask for each in rollouts]),
        engine=np.concatenate([each.log_probabilities for each in rollouts]).astype(np.float32),
        lengths=np.array([len(each.tokens) for each in rollouts], np.int32),
        truncated=np.array([each.is_truncated for each in rollouts], np.int32),
        rewards=np.asarray(rewards, np.float64),
        routing=_batch_routing(rollouts),
    )


def _batch_routing(rollouts: Sequence[Rollout]) -> Array | None:
    routings = [rollout.routing for rollout in rollouts if rollout.routing is not None]
    if routings and len(routings) < len(rollouts):
        raise ValueError(f"{len(routings)} of {len(rollouts)} rollouts carry a routing to replay; all or none must")
    return _routing_inputs(routings) if routings else None


def _routing_inputs(routings: Sequence[Array]) -> Array:
    """Return routings as inputs; the last token of each rollout, which no engine has read, routes by itself."""
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
    """Return the advantage of each token of each rollout, 0 in prompts. N times [length]"""
    token_rewards = [np.zeros(len(values)) for values in batch.split_answers(batch.engine)]
    if grpo.kl.apply_to is KlTarget.REWARD and old is not None and reference is not None:
        token_rewards = [
            -grpo.kl.coefficient * answer for answer in batch.split_answers(_estimate_token_kl(grpo, old, reference))
        ]
    answer_advantages = compute_advantages(grpo.advantage, batch.rewards.reshape(-1, grpo.group_size), token_rewards)
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
    """Return the documents of one update, of the rollouts in `members`. `extras` hold all tokens of the step. [T]"""
    masks = batch.split_by_rollout(batch.mask)
    is_left_out = grpo.overlong.filter * batch.truncated
    answer_lengths = [0 if is_left_out[number] else int(masks[number].sum()) for number in members]
    token_weights = compute_token_weights(
        grpo.loss_aggregation, answer_lengths, [number // grpo.group_size for number in members], grpo.max_new_tokens
    )
    extra_parts = {name: batch.split_by_rollout(values) for name, values in extras.items()}
    tokens, inputs = batch.split_by_rollout(batch.tokens), batch.rollout_inputs()
    return [
        Document(
            tokens=tokens[number].astype(np.int64),
            weights=(masks[number] * (weight if length else 0.0)).astype(np.float32),
            id=number,
            extras={
                **{name: parts[number].astype(np.float32) for name, parts in extra_parts.items()},
                SCALE: np.array(token_weights.scale, np.float32),
            },
            inputs=inputs[number],
        )
        for number, length, weight in zip(members, answer_lengths, token_weights.tokens, strict=True)
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


def plan_updates(count: int, grpo: Grpo, update_count: int, seed: Sequence[int]) -> list[list[int]]:
    """Return the rollouts of each update of a step: equal parts, groups together, in another order in each epoch.

    Dropped groups make parts unequal. With lossAggregation Group no group is divided: its mean needs all its answers.
    """
    unit_size = grpo.group_size if grpo.loss_aggregation is LossAggregation.GROUP else 1
    orders = [np.arange(count)]
    for epoch in range(1, grpo.epochs_per_step):
        shuffled = np.random.default_rng([*seed, epoch]).permutation(count // grpo.group_size)
        orders.append((shuffled[:, None] * grpo.group_size + np.arange(grpo.group_size)).reshape(-1))
    member_lists = [
        part.reshape(-1).tolist()
        for order in orders
        for part in np.array_split(order.reshape(-1, unit_size), update_count)
    ]
    return [part for part in member_lists if part]


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
                    first = int(self.rollouts.starts[number]) + 1
                    log_probabilities[first : first + length - 1] = output.log_probabilities[start : start + length - 1]
        return log_probabilities


def build_rollout_share(batch: RolloutBatch, plan: BatchPlan, rank: int) -> RolloutShare:
    """Return the share of a data rank."""
    rollout_parts = zip(
        batch.split_by_rollout(batch.tokens), batch.split_by_rollout(batch.mask), batch.rollout_inputs(), strict=True
    )
    documents = [
        Document(tokens.astype(np.int64), mask.astype(np.float32), number, inputs=inputs)
        for number, (tokens, mask, inputs) in enumerate(rollout_parts)
    ]
    return RolloutShare(batch, build_rank_batch(documents, plan, rank))
