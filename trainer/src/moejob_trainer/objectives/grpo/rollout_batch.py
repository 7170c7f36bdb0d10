"""The rollouts of a step as arrays that every rank has, and the documents of its updates. Pure.

Arrays lie one rollout after another. Two rollouts of prompts p, q and answers a b, c are

    tokens  p a b q c        lengths 3 2
    mask    0 1 1 0 1        rewards one for each rollout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from moejob_api.job.grpo import Grpo, KlTarget, LossAggregation
from moejob_trainer.data.packing import BatchPlan, batch_of_rank
from moejob_trainer.distributed.encoding import Array
from moejob_trainer.objectives.grpo.advantages import advantages
from moejob_trainer.objectives.grpo.aggregation import weights
from moejob_trainer.objectives.grpo.kl import divergence
from moejob_trainer.objectives.grpo.loss import ADVANTAGE, ENGINE, OLD, REFERENCE, SCALE
from moejob_trainer.objectives.grpo.rollout import Trajectory
from moejob_trainer.training import Document, MicroBatch, TokenOutputs
from moejob_trainer.training.micro_batch import ROUTING


@dataclass(frozen=True)
class Experience:
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

    def cut(self, values: Array) -> list[Array]:
        """Return the part of each rollout. [T] -> N times [length]"""
        return np.split(values, self.starts[1:])

    def inputs(self) -> list[Mapping[str, Array]]:
        """Return the inputs of each rollout beside its tokens."""
        if self.routing is None:
            return [{}] * len(self.lengths)
        return [{ROUTING: part} for part in self.cut(self.routing)]

    def of_answers(self, values: Array) -> list[Array]:
        """Return the part of each rollout that the model wrote. [T] -> N times [length of the answer]"""
        return [part[mask > 0] for part, mask in zip(self.cut(values), self.cut(self.mask), strict=True)]


def experience(rollouts: Sequence[Trajectory], rewards: Sequence[float]) -> Experience:
    """Return rollouts as arrays."""
    return Experience(
        tokens=np.concatenate([each.tokens for each in rollouts]).astype(np.int32),
        mask=np.concatenate([each.mask for each in rollouts]),
        engine=np.concatenate([each.log_probabilities for each in rollouts]).astype(np.float32),
        lengths=np.array([len(each.tokens) for each in rollouts], np.int32),
        truncated=np.array([each.is_truncated for each in rollouts], np.int32),
        rewards=np.asarray(rewards, np.float64),
        routing=_routing(rollouts),
    )


def _routing(rollouts: Sequence[Trajectory]) -> Array | None:
    known = [each.routing for each in rollouts if each.routing is not None]
    if known and len(known) < len(rollouts):
        raise ValueError(f"{len(known)} of {len(rollouts)} rollouts carry a routing to replay; all or none must")
    return _replayed(known) if known else None


def _replayed(known: Sequence[Array]) -> Array:
    """Return routings as inputs; the last token of each rollout, which no engine has read, routes by itself."""
    first = known[0]
    found = np.zeros((sum(len(each) + 1 for each in known), *first.shape[1:]), first.dtype)
    end = 0
    for each in known:
        np.add(each, 1, out=found[end : end + len(each)])
        end += len(each) + 1
    return found


def learned(grpo: Grpo, step: Experience, old: Array | None, reference: Array | None) -> list[Array]:
    """Return the advantage of each token of each rollout, 0 in prompts. N times [length]"""
    own = [np.zeros(len(answer)) for answer in step.of_answers(step.engine)]
    if grpo.kl.apply_to is KlTarget.REWARD and old is not None and reference is not None:
        own = [-grpo.kl.coefficient * answer for answer in step.of_answers(_divergence(grpo, old, reference))]
    of_answers = advantages(grpo.advantage, step.rewards.reshape(-1, grpo.group_size), own)
    return [_placed(answer, mask) for answer, mask in zip(of_answers, step.cut(step.mask), strict=True)]


def _divergence(grpo: Grpo, old: Array, reference: Array) -> Array:
    found: Array = divergence(grpo.kl.kind, torch.from_numpy(old), torch.from_numpy(reference)).numpy()
    return found


def _placed(answer: Array, mask: Array) -> Array:
    values = np.zeros(len(mask), np.float32)
    values[mask > 0] = answer
    return values


def documents(grpo: Grpo, step: Experience, members: Sequence[int], extras: Mapping[str, Array]) -> list[Document]:
    """Return the documents of one update, of the rollouts in `members`. `extras` hold all tokens of the step. [T]"""
    masks = step.cut(step.mask)
    is_left_out = grpo.overlong.filter * step.truncated
    counted = [0 if is_left_out[number] else int(masks[number].sum()) for number in members]
    weighed = weights(
        grpo.loss_aggregation, counted, [number // grpo.group_size for number in members], grpo.max_new_tokens
    )
    cut = {name: step.cut(values) for name, values in extras.items()}
    tokens, inputs = step.cut(step.tokens), step.inputs()
    return [
        Document(
            tokens=tokens[number].astype(np.int64),
            weights=(masks[number] * (weight if count else 0.0)).astype(np.float32),
            id=number,
            extras={
                **{name: parts[number].astype(np.float32) for name, parts in cut.items()},
                SCALE: np.array(weighed.scale, np.float32),
            },
            inputs=inputs[number],
        )
        for number, count, weight in zip(members, counted, weighed.tokens, strict=True)
    ]


def extras(
    step: Experience, of_tokens: Sequence[Array], old: Array | None, reference: Array | None
) -> dict[str, Array]:
    """Return the inputs of the loss: a number for each token of the step. [T]"""
    found = {ADVANTAGE: np.concatenate(of_tokens), ENGINE: step.engine}
    if old is not None:
        found[OLD] = old
    if reference is not None:
        found[REFERENCE] = reference
    return found


def updates(count: int, grpo: Grpo, parts: int, seed: Sequence[int]) -> list[list[int]]:
    """Return the rollouts of each update of a step: equal parts, groups together, in another order in each epoch.

    Dropped groups make parts unequal. With lossAggregation Group no group is divided: its mean needs all its answers.
    """
    together = grpo.group_size if grpo.loss_aggregation is LossAggregation.GROUP else 1
    orders = [np.arange(count)]
    for epoch in range(1, grpo.epochs_per_step):
        shuffled = np.random.default_rng([*seed, epoch]).permutation(count // grpo.group_size)
        orders.append((shuffled[:, None] * grpo.group_size + np.arange(grpo.group_size)).reshape(-1))
    cut = [part.reshape(-1).tolist() for order in orders for part in np.array_split(order.reshape(-1, together), parts)]
    return [part for part in cut if part]


@dataclass(frozen=True)
class Own:
    """This data rank's share of all rollouts, for a forward pass without an update."""

    step: Experience
    batches: Sequence[MicroBatch]

    def placed(self, outputs: Sequence[TokenOutputs]) -> Tensor:
        """Return the log-probabilities of all tokens of the step, 0 where another rank has the document. [T]"""
        device = outputs[0].log_probabilities.device
        found = torch.zeros(len(self.step.tokens), device=device)
        for batch, said in zip(self.batches, outputs, strict=True):
            for start, length, number in zip(batch.cu_lengths.tolist(), batch.lengths, batch.documents, strict=False):
                if length:
                    # The output at position i is about its label, token i + 1.
                    first = int(self.step.starts[number]) + 1
                    found[first : first + length - 1] = said.log_probabilities[start : start + length - 1]
        return found


def own(step: Experience, plan: BatchPlan, rank: int) -> Own:
    """Return the share of a data rank."""
    parts = zip(step.cut(step.tokens), step.cut(step.mask), step.inputs(), strict=True)
    plain = [
        Document(tokens.astype(np.int64), mask.astype(np.float32), number, inputs=inputs)
        for number, (tokens, mask, inputs) in enumerate(parts)
    ]
    return Own(step, batch_of_rank(plain, plan, rank))
