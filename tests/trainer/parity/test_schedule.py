"""The learning rate follows the steps of a run, however many updates each of them makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moejob_api.models.shape import Family
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.conversion.loading import open_published_checkpoint
from moejob_trainer.loop import TrainingRun, run_training_loop
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine, TrainingPlacement
from moejob_trainer.megatron.weights import load_pretrained
from moejob_trainer.objectives import ObjectiveState
from moejob_trainer.training import LossTerms, MicroBatch, TokenOutputs, TrainingEngine
from moejob_trainer.training.learning_rate import learning_rate
from trainer.parity.cells import (
    LEARNING_RATE,
    TRAINING,
    Cell,
    Deviation,
    build_cell_stages,
    make_documents,
    make_loss,
    measure_deviation,
    micro_batches,
    parameter_groups,
    reference_model,
    run_backward,
)
from trainer.worlds import Worlds

# Of two updates each: both, one, none, both. Answers without an end, and groups without a signal, leave some out.
UPDATES = ((0, 1), (2,), (), (3, 4))
RATES = tuple(LEARNING_RATE * share for share in (1 / 3, 2 / 3, 1.0, 1.0))
SECTIONS: dict[str, Any] = {"training": {**TRAINING, "scheduler": {"kind": "Constant", "warmupSteps": 3}}}


@dataclass
class Parts:
    """Objective, checkpoints and stop of a run from `begun` on, whose steps make the updates of UPDATES."""

    cell: Cell
    engine: MegatronTrainingEngine
    begun: int

    def updates(self, step: int, engine: TrainingEngine) -> Iterator[Sequence[MicroBatch]]:  # noqa: ARG002
        for number in UPDATES[step]:
            yield micro_batches(self.cell, self.engine, number)

    def loss(self, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
        return make_loss(self.cell, self.engine)(outputs, batch)

    def restore(self) -> int:
        return self.begun

    def poll(self) -> None: ...

    def is_due(self, step: int) -> bool:  # noqa: ARG002
        return False

    def save(self, step: int) -> None: ...

    def has_agreed(self) -> bool:
        return False

    def snapshot_state(self) -> ObjectiveState:
        return ObjectiveState({})

    def load_state(self, state: ObjectiveState) -> None: ...


def trained_by_schedule(folder: Path, begun: int) -> tuple[list[float], Deviation]:
    """Train from a step to the last one; return the rates, and the distance of the weights from the reference's."""
    use_cpu()
    cell = Cell(Family.QWEN3_MOE, SECTIONS)
    stages, groups, model = build_cell_stages(cell, folder)
    load_pretrained(stages, open_published_checkpoint(folder / "first", build_tensor_table(model.shape)), groups)
    spec = cell.spec()

    def rate(step: int) -> float:
        return learning_rate(step, len(UPDATES), spec.training.optimizer, spec.training.scheduler)

    placement = TrainingPlacement(groups, torch.device("cpu"), groups.world.handle)
    engine = MegatronTrainingEngine(model, spec, stages, placement, rate)
    parts = Parts(cell, engine, begun)
    rates: list[float] = []
    try:
        run_training_loop(
            TrainingRun(
                engine=engine,
                objective=parts,
                checkpoints=parts,
                stop=parts,
                total_steps=len(UPDATES),
                report=lambda _, results: rates.extend(result.learning_rate for result in results),
            )
        )
        return rates, measure_deviation(engine, folder / "last", lambda piece: piece.master.read())
    finally:
        stop_groups()


def write_schedule_reference(folder: Path, begun: int) -> None:
    """Train with Transformers and torch's AdamW, at the rates that were reckoned by hand."""
    reference_model(Family.QWEN3_MOE).save_pretrained(folder / "first")
    model = AutoModelForCausalLM.from_pretrained(folder / "first", dtype=torch.float32, experts_implementation="eager")
    adam = torch.optim.AdamW(parameter_groups(model), lr=0.0, betas=(0.9, 0.95), eps=1e-3)
    for rate, numbers in zip(RATES[begun:], UPDATES[begun:], strict=True):
        for group in adam.param_groups:
            group["lr"] = rate
        for number in numbers:
            adam.zero_grad()
            run_backward(model, make_documents(number))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
    model.save_pretrained(folder / "last")


@pytest.mark.parametrize("begun", [pytest.param(0, id="from the start"), pytest.param(2, id="resumed behind them")])
def test_updates_that_were_left_out_do_not_hold_the_schedule_back(worlds: Worlds, tmp_path: Path, begun: int) -> None:
    write_schedule_reference(tmp_path, begun)
    ((rates, weights),) = worlds.run(1, trained_by_schedule, tmp_path, begun)
    steps = [step for step in range(begun, len(UPDATES)) for _ in UPDATES[step]]
    assert rates == pytest.approx([RATES[step] for step in steps])
    assert weights.error < 1e-4, weights
