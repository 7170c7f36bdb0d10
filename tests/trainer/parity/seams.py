"""A second objective, trivial but shaped like GRPO: what the loop and the engine have to offer beside SFT.

A step looks at the weights and asks the model for its log-probabilities before it learns, then updates twice, on halves
of the batch, by how far each token has moved since and by an advantage that came with its document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_trainer.data.packing import batch_plan, build_global_batch
from moejob_trainer.loop import LoopOutcome, TrainingRun, run_training_loop
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.objectives import ObjectiveState
from moejob_trainer.training import (
    Document,
    LossTerms,
    MicroBatch,
    TokenOutputs,
    TrainingEngine,
    UpdateResult,
    WeightedMean,
)
from trainer.parity.cells import Cell, make_documents, start_engine

STEPS = 2
# Log-probabilities and entropies of a document's predictions: [2, length - 1].
StageOutput = Mapping[int, Any]


@dataclass(frozen=True)
class LearnedRun:
    """Results of one rank of a run."""

    outcome: LoopOutcome
    updates: Sequence[Sequence[UpdateResult]]
    # Of this data rank's documents, before anything was learned.
    said: StageOutput
    # What this rank was given of the weights at the beginning of each step.
    weights: Sequence[Mapping[str, Any]]


@dataclass
class MovedTokens:
    """The objective."""

    cell: Cell
    data_rank: int
    said: dict[int, Any] = field(default_factory=dict)
    weights: list[Mapping[str, Any]] = field(default_factory=list)

    def updates(self, step: int, engine: TrainingEngine) -> Iterator[Sequence[MicroBatch]]:
        """Half of the batch, then the other, both with what was said before the first."""
        owned = ((name, tensor) for name, tensor in engine.export_weights() if not tensor.is_meta)
        self.weights.append({name: tensor.detach().float().numpy().copy() for name, tensor in owned})
        halves = [self._half(step, half) for half in range(2)]
        said = [engine.compute_outputs(half) for half in halves]
        if step == 0:
            for number, of_half in enumerate(said):
                self.said.update(_by_document(_half(step, number), halves[number], of_half))
        for half, of_half in zip(halves, said, strict=True):
            yield [_with_old(batch, outputs) for batch, outputs in zip(half, of_half, strict=True)]

    def loss(self, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
        """The advantage of each token times how much likelier it became."""
        ratio = (outputs.log_probabilities - batch.extras["old"]).exp()
        advantage = _of_tokens(batch.extras["advantage"], batch)
        weight = batch.weights.sum()
        return LossTerms(
            total=-(ratio * advantage * batch.weights).sum(),
            metrics={
                "ratio": WeightedMean((ratio.detach() * batch.weights).sum(), weight),
                "entropy": WeightedMean((outputs.entropy * batch.weights).sum(), weight),
            },
        )

    def snapshot_state(self) -> ObjectiveState:
        """Nothing: batches are made from the number of the step."""
        return ObjectiveState({})

    def load_state(self, state: ObjectiveState) -> None:
        """Nothing."""

    def _half(self, step: int, number: int) -> list[MicroBatch]:
        spec = self.cell.spec()
        plan = batch_plan(spec, layout_of(spec.parallelism, 8), pad_token=0)
        return build_global_batch(_half(step, number), plan)[self.data_rank]


class NoCheckpoints:
    """Checkpoints of a run that keeps none."""

    def restore(self) -> int:
        """From the beginning."""
        return 0

    def poll(self) -> None:
        """Nothing is under way."""

    def is_due(self, step: int) -> bool:  # noqa: ARG002
        """Never."""
        return False

    def save(self, step: int) -> None:
        """Only the last step is saved although it is not due."""
        if step < STEPS:
            raise AssertionError(f"step {step} was saved though it was not due")


class NeverStop:
    """A stop that never comes."""

    def has_agreed(self) -> bool:
        """Never."""
        return False


def train_run(cell: Cell, folder: Path) -> LearnedRun:
    """Trains with the objective; one rank's part."""
    use_cpu()
    engine = start_engine(cell, folder)
    reported: list[Sequence[UpdateResult]] = []
    objective = MovedTokens(cell, engine.groups.data.rank)
    try:
        run = TrainingRun(
            engine=engine,
            objective=objective,
            checkpoints=NoCheckpoints(),
            stop=NeverStop(),
            total_steps=STEPS,
            report=lambda _, results: reported.append(results),
        )
        outcome = run_training_loop(run)
    finally:
        stop_groups()
    return LearnedRun(outcome, reported, objective.said, objective.weights)


def said_by_transformers(folder: Path) -> StageOutput:
    """The same of each document, one at a time."""
    config = AutoConfig.from_pretrained(folder / "first")
    config._attn_implementation = config._experts_implementation = "eager"  # noqa: SLF001 how Transformers takes it
    model = AutoModelForCausalLM.from_pretrained(folder / "first", config=config).float()
    found = {}
    for document in (document for half in range(2) for document in _half(0, half)):
        tokens = torch.from_numpy(document.tokens)
        with torch.no_grad():
            every = model(tokens[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
        own = every.gather(-1, tokens[1:, None])[:, 0]
        found[document.id] = torch.stack([own, -(every.exp() * every).sum(-1)]).numpy()
    return found


def _half(step: int, number: int) -> list[Document]:
    """Documents with advantages of both signs."""
    batch = make_documents(step)[number::2]
    return [
        replace(one, extras={"advantage": np.array(0.7 * (-1) ** one.id + 0.1 * one.id, np.float32)}) for one in batch
    ]


def _with_old(batch: MicroBatch, outputs: TokenOutputs) -> MicroBatch:
    return replace(batch, extras={**batch.extras, "old": outputs.log_probabilities})


def _of_tokens(values: Tensor, batch: MicroBatch) -> Tensor:
    """Repeat the facts of each document for each of its tokens."""
    return values.repeat_interleave(batch.cu_lengths.diff().to(values.device))


def _by_document(
    half: Sequence[Document], batches: Sequence[MicroBatch], outputs: Sequence[TokenOutputs]
) -> Iterator[tuple[int, Any]]:
    for batch, of_batch in zip(batches, outputs, strict=True):
        both = torch.stack([of_batch.log_probabilities, of_batch.entropy])
        for start, length, document in zip(batch.cu_lengths.tolist(), batch.lengths, batch.documents, strict=False):
            if length:
                yield half[document].id, both[:, start : start + length - 1].numpy().copy()
