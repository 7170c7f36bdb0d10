"""Experts of which every replica keeps a share are whole around their own products alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn

from builders import merge_sections
from moejob_api.models.shape import Family
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.divided_matrix import DividedMatrix
from moejob_trainer.megatron.replica_sums import ReplicaSums
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.model.layer import TransformerLayer
from moejob_trainer.model.moe_layer import LocalExperts
from trainer.parity.cells import Cell, assert_like, make_loss, micro_batches, start_engine, train_cell
from trainer.parity.lora import LORA
from trainer.parity.references import Reference
from trainer.worlds import Worlds

LAYERS = 4
SHARDED: dict[str, Any] = {"memory": {"sharding": "FSDP"}, "training": {"microBatchSize": 1}}
ZERO2: dict[str, Any] = {"memory": {"sharding": "ZeRO2"}, "training": {"microBatchSize": 1}}
AGAIN: dict[str, dict[str, Any]] = {
    "everything kept": {},
    "layers recomputed": {"training": {"recompute": {"granularity": "Full"}}},
    "groups of layers recomputed": {
        "training": {"recompute": {"granularity": "Full", "method": "Uniform", "layers": 3}}
    },
    "experts recomputed": {"training": {"recompute": {"granularity": "Selective", "modules": ["Experts"]}}},
}


def _cell(sections: Mapping[str, Any], data: int = 2) -> Cell:
    return Cell(Family.QWEN3_MOE, merge_sections(merge_sections(SHARDED, {"parallelism": {"data": data}}), sections))


@pytest.mark.parametrize("data", [2, 3])
@pytest.mark.parametrize("how", AGAIN)
def test_several_micro_batches_train_what_transformers_trains(
    worlds: Worlds, reference: Reference, how: str, data: int
) -> None:
    folder, expected = reference(Family.QWEN3_MOE)
    assert_like(worlds.run(data, train_cell, _cell(AGAIN[how], data), folder), expected, within=1e-5)


@pytest.mark.parametrize("sections", [{}, ZERO2], ids=["FSDP", "ZeRO-2"])
def test_shares_and_gradients_that_replicas_read_train_the_same(
    worlds: Worlds, reference: Reference, sections: Mapping[str, Any]
) -> None:
    folder, expected = reference(Family.QWEN3_MOE)
    cell = _cell(merge_sections(sections, {"training": {"communication": {"readReplicas": True}}}), 3)
    assert_like(worlds.run(3, train_cell, cell, folder), expected, within=1e-5)


@dataclass(frozen=True)
class WholeExperts:
    """Layers with whole experts: the most at any time of a step and of an evaluation, and those left behind."""

    most: int
    left: int
    gathers: int
    sums: int
    micro_batches: int


@pytest.mark.parametrize("how", AGAIN)
def test_two_layers_have_whole_experts_at_most(worlds: Worlds, reference: Reference, how: str) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    for seen in worlds.run(2, observe_update, _cell(AGAIN[how]), folder):
        assert (seen.most, seen.left) == (2, 0)


def test_layers_at_the_turns_of_passes_stay_whole(worlds: Worlds, reference: Reference) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    seen = worlds.run(2, observe_update, _cell({}), folder)[0]
    assert seen.micro_batches > 1
    # All of them once, then all but two on each way.
    passes = 2 * seen.micro_batches - 1
    assert seen.gathers == 2 * (LAYERS + passes * (LAYERS - 2))


def test_zero_2_gathers_experts_once_a_step(worlds: Worlds, reference: Reference) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    seen = worlds.run(2, observe_update, _cell(ZERO2), folder)[0]
    assert (seen.most, seen.left, seen.gathers) == (LAYERS, 0, 2 * LAYERS)


def test_gradients_leave_once_for_each_micro_batch(worlds: Worlds, reference: Reference) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    for how in AGAIN:
        seen = worlds.run(2, observe_update, _cell(AGAIN[how]), folder)[0]
        assert seen.sums == 2 * LAYERS * seen.micro_batches, how


@pytest.mark.parametrize("sections", [{}, ZERO2], ids=["FSDP", "ZeRO-2"])
def test_experts_without_replicas_lie_still(worlds: Worlds, reference: Reference, sections: Mapping[str, Any]) -> None:
    folder, expected = reference(Family.QWEN3_MOE)
    alone = {"parallelism": {"data": 2, "expert": 2, "expertLayout": "Folded"}}
    cell = _cell(merge_sections(sections, alone))
    seen = worlds.run(2, observe_update, cell, folder)[0]
    assert (seen.gathers, seen.sums) == (0, 0)
    assert_like(worlds.run(2, train_cell, cell, folder), expected, within=1e-5)


def test_frozen_experts_are_gathered_and_have_no_gradients(worlds: Worlds, lora_reference: Reference) -> None:
    folder, _ = lora_reference(Family.QWEN3_MOE)
    seen = worlds.run(2, observe_update, _cell({"training": {"lora": LORA}}), folder)[0]
    assert (seen.most, seen.left, seen.sums) == (2, 0, 0)
    assert seen.gathers > 2 * LAYERS


def observe_update(cell: Cell, folder: Path) -> WholeExperts:
    """Return what one rank sees in an update."""
    use_cpu()
    try:
        return _count_whole_experts(cell, start_engine(cell, folder))
    finally:
        stop_groups()


def _count_whole_experts(cell: Cell, engine: MegatronTrainingEngine) -> WholeExperts:
    batches, whole = micro_batches(cell, engine, 0), [0]
    experts = [module for module in engine.stages[0].modules() if isinstance(module, LocalExperts)]
    shares = [{parameter.data_ptr() for parameter in module.parameters()} for module in experts]

    def count(*_: object) -> None:
        pairs = zip(experts, shares, strict=True)
        whole.append(sum(module.gate_up.data_ptr() not in held for module, held in pairs))

    for layer in [
        module for module in engine.stages[0].modules() if isinstance(module, (TransformerLayer, LocalExperts))
    ]:
        layer.register_forward_hook(partial(_count_both_ways, count))
    gather, send = DividedMatrix.start_gather, ReplicaSums.send_gradient
    with (
        patch.object(DividedMatrix, "start_gather", autospec=True, side_effect=gather) as gathers,
        patch.object(ReplicaSums, "send_gradient", autospec=True, side_effect=send) as sums,
    ):
        engine.update(batches, make_loss(cell, engine))
    most = max(whole)
    count()
    return WholeExperts(most, whole[-1], gathers.call_count, sums.call_count, len(batches))


def _count_both_ways(count: Callable[..., None], _: nn.Module, __: object, output: Tensor) -> None:
    """In the forward pass behind this module, and in the backward pass before it."""
    count()
    if output.requires_grad:
        output.register_hook(count)
