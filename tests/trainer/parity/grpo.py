"""A step of GRPO on recorded answers: in any layout, and as plain Transformers computes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_trainer.data.packing import batch_plan
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.objectives import ObjectiveState
from moejob_trainer.objectives.grpo.objective import GroupRelativePolicyOptimization, GrpoSettings, StepServices
from moejob_trainer.objectives.grpo.rank_exchange import PeerRanks
from moejob_trainer.objectives.grpo.rollout_batch import (
    Author,
    Rollout,
    RolloutBatch,
    RolloutRow,
    TokenSpan,
    build_rollout_batch,
)
from moejob_trainer.rollouts.interface import SyncReport
from moejob_trainer.training import UpdateResult
from moejob_trainer.training.micro_batch import Array
from trainer.parity.cells import Cell, start_engine
from trainer.parity.routing_replay import force_choices, random_choices

TEMPERATURE, MAXIMUM, COEFFICIENT, ENTROPY_COEFFICIENT = 0.7, 1.05, 0.2, 0.3
GROUP_SIZE = 4
GRPO: dict[str, Any] = {
    "groupSize": GROUP_SIZE,
    "promptsPerStep": 2,
    "epochsPerStep": 2,
    "temperature": TEMPERATURE,
    "maxNewTokens": 20,
    "mismatch": {"maximum": MAXIMUM},
    "kl": {"coefficient": COEFFICIENT},
    "entropyCoefficient": ENTROPY_COEFFICIENT,
    "rewards": [{"name": "exact-match"}],
}
SECTIONS: dict[str, Any] = {"method": "GRPO", "grpo": GRPO}
LENGTHS = ((4, 9), (4, 3), (4, 17), (4, 8), (7, 5), (7, 12), (7, 2), (7, 10))
REWARDS = (1.0, 0.0, 0.5, 0.0, -1.0, 2.0, 0.0, 0.0)

# Groups of three and two rollouts of one to three rows. A row is what is read beyond the row before it, and the answer.
EPISODES = ((((4, 9),), ((4, 3), (2, 6)), ((4, 8),)), (((7, 5), (3, 4), (1, 2)), ((7, 12),)))
EPISODE_REWARDS = (1.0, 0.0, 0.5, 2.0, -1.0)
EPISODE_SECTIONS: dict[str, Any] = {
    **SECTIONS,
    "grpo": {**GRPO, "lossAggregation": "Sequence", "advantage": "RLOO"},
}


@dataclass(frozen=True)
class LearnedStep:
    """The step as one rank saw it."""

    updates: Sequence[UpdateResult]
    metrics: Mapping[str, float]


@dataclass
class RecordedSource:
    """Rank 0's source: the same answers whatever the layout."""

    answers: RolloutBatch

    def collect_rollouts(self, step: int) -> RolloutBatch:  # noqa: ARG002
        """Return the answers."""
        return self.answers

    def evaluate(self) -> Mapping[str, float]:
        """Nothing is evaluated."""
        return {}

    def give_up_request(self) -> None:
        """There is none."""

    def log_samples(self, step: int, advantages: Sequence[float]) -> None:
        """Note nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Nothing is measured."""
        return {}

    def measure_idle_share(self) -> float:
        """No engine is there."""
        return 0.0

    def snapshot_state(self) -> ObjectiveState:
        """Nothing is kept."""
        return ObjectiveState({})

    def load_state(self, state: ObjectiveState) -> None:
        """Nothing is kept."""


class ByteCounter:
    """Counts the bytes of what comes."""

    @property
    def stacked_elements(self) -> int:
        """Each expert comes by itself."""
        return 0

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> SyncReport:
        """Take all of it."""
        return SyncReport(version, 0.0, sum(tensor.nbytes for _, tensor in weights), 0.0, 0.0, 1.0)

    def release(self) -> None:
        """Hold nothing."""


def learn_step(cell: Cell, folder: Path, answers: RolloutBatch) -> LearnedStep:
    """Take one step with the objective; one rank's part."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        spec, groups = cell.spec(), engine.groups
        assert spec.grpo is not None
        peers = PeerRanks(groups.world.rank, groups.world.handle if groups.world.size > 1 else None, groups.data)
        plan = batch_plan(spec, layout_of(spec.parallelism, 8), pad_token=0)
        parts = StepServices(peers, ByteCounter(), RecordedSource(answers) if peers.is_first else None)
        objective = GroupRelativePolicyOptimization(GrpoSettings(spec.grpo, plan, 1, 3), parts)
        updates = [engine.update(batches, objective.loss) for batches in objective.updates(0, engine)]
        return LearnedStep(updates, objective.metrics())
    finally:
        stop_groups()


def recorded(folder: Path) -> RolloutBatch:
    """Answers of random tokens, of which engines say nearly what Transformers does."""
    random = np.random.default_rng(11)
    model, rollouts = _model(folder), []
    for number, (asked, said) in enumerate(LENGTHS):
        tokens = random.integers(3, 38, asked + said).astype(np.int32)
        rollouts.append(Rollout((_row(model, tokens, asked, random),), number // GROUP_SIZE, is_truncated=False))
    return build_rollout_batch(rollouts, REWARDS)


def recorded_episodes(folder: Path) -> RolloutBatch:
    """Episodes of random tokens, each row of which repeats the row before it."""
    random = np.random.default_rng(12)
    model, rollouts = _model(folder), []
    for group, episodes in enumerate(EPISODES):
        for rows in episodes:
            tokens, built_rows = np.zeros(0, np.int32), []
            for asked, said in rows:
                read = len(tokens) + asked
                tokens = np.concatenate([tokens, random.integers(3, 38, asked + said)]).astype(np.int32)
                built_rows.append(_row(model, tokens, read, random))
            rollouts.append(Rollout(tuple(built_rows), group, is_truncated=False))
    return build_rollout_batch(rollouts, EPISODE_REWARDS)


def _row(model: Any, tokens: Array, asked: int, random: np.random.Generator) -> RolloutRow:
    with torch.no_grad():
        own = _log_probabilities(model, tokens)[0][asked - 1 :].numpy()
    said = (own + random.normal(0, 0.1, len(own))).astype(np.float32)
    return RolloutRow((_span(Author.PROMPT, tokens[:asked]), _span(Author.MODEL, tokens[asked:], said)))


def replayed(answers: RolloutBatch) -> RolloutBatch:
    """The same answers with experts that no router chose, of the four layers of the Qwen3-MoE of these tests."""
    parts = (
        random_choices(number, tokens, (4, 8, 3)) for number, tokens in enumerate(answers.split_by_row(answers.tokens))
    )
    return replace(answers, routing=np.concatenate([*parts]))


def by_transformers(folder: Path, answers: RolloutBatch) -> tuple[float, float]:
    """The loss of the first update and the norm of its gradient, an answer at a time."""
    model = _trained_model(folder)
    rewards = np.array(REWARDS).reshape(-1, GROUP_SIZE)
    spread = rewards.std(1, ddof=1, keepdims=True) + 1e-4
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / spread).flatten()
    count, loss = sum(said for _, said in LENGTHS), 0.0
    for number, (asked, said) in enumerate(LENGTHS):
        start = int(answers.row_starts[number])
        tokens = answers.tokens[start : start + asked + said]
        choices = None if answers.routing is None else answers.routing[start : start + asked + said]
        engine = answers.engine[start + asked : start + asked + said]
        total = _token_losses(model, tokens, engine, float(advantages[number]), choices).sum() / count
        total.backward()
        loss += total.item()
    return loss, _gradient_norm(model)


def episodes_by_transformers(folder: Path, batch: RolloutBatch) -> tuple[float, float]:
    """The same of episodes, a row at a time: the mean over rollouts of the means over tokens of all their rows."""
    model, start, number, loss = _trained_model(folder), 0, 0, 0.0
    count = sum(map(len, EPISODES))
    for episodes in EPISODES:
        rewards = EPISODE_REWARDS[number : number + len(episodes)]
        for place, rows in enumerate(episodes):
            others = [reward for other, reward in enumerate(rewards) if other != place]
            advantage, written, read = rewards[place] - sum(others) / len(others), sum(said for _, said in rows), 0
            for asked, said in rows:
                end = start + read + asked + said
                losses = _token_losses(model, batch.tokens[start:end], batch.engine[end - said : end], advantage)
                total = losses.sum() / written / count
                total.backward()
                loss += total.item()
                start, read = end, read + asked + said
        number += len(episodes)
    return loss, _gradient_norm(model)


def _trained_model(folder: Path) -> Any:
    model = _model(folder)
    for name, parameter in model.named_parameters():
        # The router of a MoE model is frozen.
        parameter.requires_grad_(not name.endswith("mlp.gate.weight"))
    return model


def _token_losses(model: Any, tokens: Array, said: Array, advantage: float, choices: Array | None = None) -> Tensor:
    """The losses of the last tokens of a text, of which the engine said this."""
    asked = len(tokens) - len(said)
    own, entropies = (values[asked - 1 :] for values in _log_probabilities(model, tokens, choices))
    # The reference model has the same weights still, and routes by itself.
    apart = own - _log_probabilities(model, tokens)[0][asked - 1 :].detach()
    kl = COEFFICIENT * ((-apart).exp() - 1 + apart)
    weights = (own.detach() - torch.from_numpy(said)).exp().clamp(max=MAXIMUM)
    ratios = (own - own.detach()).exp()
    return -(ratios * weights * advantage + ENTROPY_COEFFICIENT * entropies - kl)


def _gradient_norm(model: Any) -> float:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack([gradient.double().norm() for gradient in gradients]).norm())


def _model(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder / "first")
    config._attn_implementation = config._experts_implementation = "eager"  # noqa: SLF001 how Transformers takes it
    return AutoModelForCausalLM.from_pretrained(folder / "first", config=config).float()


def _log_probabilities(model: Any, tokens: Any, choices: Array | None = None) -> tuple[Tensor, Tensor]:
    """Of every token but the first, at the temperature, and the entropy there. [N - 1] both"""
    row = torch.from_numpy(np.asarray(tokens, np.int64))
    with nullcontext() if choices is None else force_choices(model, choices):
        every = (model(row[None], use_cache=False).logits[0, :-1].double() / TEMPERATURE).log_softmax(-1)
    return every.gather(-1, row[1:, None])[:, 0], -(every.exp() * every).sum(-1)


def _span(author: Author, tokens: Any, said: Any = None) -> TokenSpan:
    plain = np.zeros(len(tokens), np.float32)
    return TokenSpan(author, tokens, plain if said is None else said, np.zeros(len(tokens), np.int32))
