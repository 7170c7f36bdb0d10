"""Megatron-Bridge builds Megatron-Core's own GPTModel from published files; our model computes the same from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge.reference import MegatronModel
from moejob_api.models.shape import Family
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from trainer.parity.cells import (
    MEGATRON_NUMBERS,
    Cell,
    make_documents,
    make_loss,
    measure_deviation,
    micro_batches,
    reference_model,
    run_backward,
    save_gradients,
    start_engine,
)

FAMILIES: dict[Family, dict[str, Any]] = {
    Family.LLAMA: {},
    Family.QWEN2: {},
    Family.QWEN3: {},
    Family.QWEN3_MOE: {},
    Family.MIXTRAL: {},
    Family.QWEN2_MOE: {},
    Family.DEEPSEEK_V3: MEGATRON_NUMBERS[Family.DEEPSEEK_V3],
}
CLOSE = 1e-5
ONE = (23,)


@pytest.fixture(scope="module", params=FAMILIES)
def cell(request: pytest.FixtureRequest) -> Cell:
    return Cell(request.param, {}, lengths=ONE)


@pytest.fixture(scope="module")
def folder(cell: Cell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(cell.family)
    reference_model(cell.family, **FAMILIES[cell.family]).save_pretrained(made / "first")
    return made


@pytest.fixture(scope="module")
def engine(cell: Cell, folder: Path) -> Iterator[MegatronTrainingEngine]:
    use_cpu()
    yield start_engine(cell, folder)
    stop_groups()


@pytest.fixture(scope="module")
def megatron(engine: MegatronTrainingEngine, folder: Path) -> MegatronModel:
    """Made after the engine, whose groups it uses."""
    assert engine.groups.world.size == 1
    return MegatronModel(folder / "first")


def test_megatron_computes_the_same_logits(cell: Cell, engine: MegatronTrainingEngine, megatron: MegatronModel) -> None:
    tokens = torch.from_numpy(make_documents(0, ONE)[0].tokens)
    with torch.no_grad():
        theirs = megatron(tokens[None]).logits[0]
    with _final_hidden(engine) as hidden:
        engine.compute_outputs(micro_batches(cell, engine, 0))
    ours = (hidden[0] @ engine.stages[0].output.weight.T)[: len(tokens), : theirs.shape[1]]
    assert (ours - theirs).abs().max().item() < CLOSE * theirs.abs().max().item()


def test_megatron_computes_the_same_gradients(
    cell: Cell, engine: MegatronTrainingEngine, megatron: MegatronModel, folder: Path
) -> None:
    loss = run_backward(megatron, make_documents(0, ONE))
    save_gradients(megatron, folder / "gradients", megatron.save)
    result = engine.update(micro_batches(cell, engine, 0), make_loss(cell, engine))
    assert result.loss == pytest.approx(loss, rel=CLOSE)
    worst = measure_deviation(engine, folder / "gradients", lambda piece: piece.gradient)
    assert worst.error < CLOSE, f"the gradient of {worst.name} is off by {worst.error}"


@contextmanager
def _final_hidden(engine: MegatronTrainingEngine) -> Iterator[list[Tensor]]:
    """Normed hidden states of the last layer, as they enter the output layer."""
    found: list[Tensor] = []
    handle = engine.stages[0].final_norm.register_forward_hook(lambda _module, _given, made: found.append(made))
    yield found
    handle.remove()
