"""Stages of which every replica keeps a share only train the model that Transformers trains in one process."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from builders import merge_sections
from moejob_api.job.training import Lora
from moejob_api.models.shape import Family
from moejob_trainer.conversion.adapters import build_adapter_table
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.shares import find_sharding, local_part
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.weights import initialise_adapters, initialise_weights, named_weights
from moejob_trainer.model.parameters import model_parameters
from trainer.parity.cells import (
    ALIKE,
    FOLDED,
    STEPS,
    Cell,
    assert_like,
    build_cell_stages,
    make_loss,
    micro_batches,
    start_engine,
    train_cell,
)
from trainer.parity.checkpoints import Resumption, resume_runs, state_in, train_and_save, unequal_names
from trainer.parity.references import Reference
from trainer.rows import make_rows
from trainer.worlds import Worlds

WITHIN = 1e-5
SHARDED: dict[str, Any] = {"memory": {"sharding": "FSDP"}}
ZERO2: dict[str, Any] = {"memory": {"sharding": "ZeRO2"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "DP2": {"data": 2},
    # Three ranks divide nothing evenly.
    "DP3": {"data": 3},
    "DP4": {"data": 4},
    "TP2.DP2": {"tensor": 2, "data": 2},
    "EP2": {"expert": 2},
    "EP2.DP2": {"expert": 2, "data": 2},
    "EP2 folded over DP4": {"expert": 2, "data": 4, **FOLDED},
    "ETP2 folded over DP4": {"data": 4, "expertTensor": 2, **FOLDED},
    "CP2": {"context": 2},
    "TP2.CP2.EP4 folded over TP2.CP2.DP2": {"tensor": 2, "context": 2, "data": 2, "expert": 4, **FOLDED},
}
MIXED = {"tensor": 2, "data": 2, "expert": 2, **FOLDED}
TRAINED: dict[str, dict[str, Any]] = ALIKE | {
    "experts recomputed": {"training": {"recompute": {"granularity": "Selective", "modules": ["Experts"]}}},
    "tokens gathered": {"moe": {"dispatcher": "AllGather"}},
    "tokens written to peers": {"moe": {"dispatcher": "Flex"}},
    "tokens sent to nodes of EP4": {
        "parallelism": {"expert": 4},
        "moe": {"dispatcher": "Flex"},
        "resources": {"gpusPerNode": 2},
    },
}


NEWER = (Family.GLM4_MOE_LITE, Family.OLMOE, Family.ERNIE4_5_MOE, Family.MINIMAX_M2)


def _cell(family: Family, parallelism: Mapping[str, Any], sections: Mapping[str, Any] | None = None) -> Cell:
    return Cell(family, merge_sections(merge_sections(SHARDED, {"parallelism": dict(parallelism)}), sections or {}))


def _assert_like_reference(worlds: Worlds, reference: Reference, cell: Cell) -> None:
    folder, expected = reference(cell.family)
    assert_like(worlds.run(cell.ranks(), train_cell, cell, folder), expected, within=WITHIN)


@pytest.mark.parametrize(
    ("family", "layout"),
    make_rows(
        [
            *product((Family.QWEN3_MOE, Family.MIXTRAL, Family.DEEPSEEK_V3, *NEWER), LAYOUTS),
            *product((Family.QWEN3_NEXT, Family.QWEN3_5_MOE), (layout for layout in LAYOUTS if "CP" not in layout)),
        ],
        [
            *product((Family.QWEN3_MOE,), ("alone", "DP3", "EP2", "TP2.CP2.EP4 folded over TP2.CP2.DP2")),
            *product((Family.DEEPSEEK_V3,), ("TP2.DP2", "ETP2 folded over DP4")),
            *product(NEWER, ("EP2.DP2",)),
            (Family.QWEN3_NEXT, "TP2.DP2"),
            (Family.QWEN3_5_MOE, "DP3"),
        ],
    ),
)
def test_a_layout_of_shares_trains_what_transformers_trains(
    worlds: Worlds, reference: Reference, family: Family, layout: str
) -> None:
    _assert_like_reference(worlds, reference, _cell(family, LAYOUTS[layout]))


GATHERED = ("alone", "DP3", "EP2.DP2", "TP2.CP2.EP4 folded over TP2.CP2.DP2")


@pytest.mark.parametrize(
    ("family", "layout"),
    make_rows(
        product((Family.QWEN3_MOE, Family.DEEPSEEK_V3), GATHERED),
        [*product((Family.QWEN3_MOE,), GATHERED), *product((Family.DEEPSEEK_V3,), ("DP3", "EP2.DP2"))],
    ),
)
def test_weights_that_stay_gathered_train_what_transformers_trains(
    worlds: Worlds, reference: Reference, family: Family, layout: str
) -> None:
    _assert_like_reference(worlds, reference, _cell(family, LAYOUTS[layout], ZERO2))


@pytest.mark.parametrize("family", [Family.GPT_OSS, Family.QWEN2, Family.DEEPSEEK_V2])
def test_biases_sinks_and_tied_matrices_are_shared_too(worlds: Worlds, reference: Reference, family: Family) -> None:
    _assert_like_reference(worlds, reference, _cell(family, {"tensor": 2, "data": 3}))


# Layers are recomputed in one of its three ways, and experts in another test.
@pytest.mark.parametrize(
    "how",
    make_rows(TRAINED, ("everything recomputed", "activations offloaded", "tokens gathered")),
)
def test_how_memory_is_saved_and_batches_are_made_changes_nothing(
    worlds: Worlds, reference: Reference, how: str
) -> None:
    _assert_like_reference(worlds, reference, _cell(Family.QWEN3_MOE, MIXED, TRAINED[how]))


def test_weights_that_stay_gathered_train_the_same_with_layers_recomputed(worlds: Worlds, reference: Reference) -> None:
    recomputed = {"training": {"recompute": {"granularity": "Full"}}}
    _assert_like_reference(worlds, reference, _cell(Family.QWEN3_MOE, MIXED, merge_sections(ZERO2, recomputed)))


EVEN: dict[str, dict[str, Any]] = {
    "moving bias": {"balancing": "ExpertBias"},
    "balancing loss": {"balancing": "AuxLoss", "auxLossCoefficient": 0.01},
    "z-loss": {"zLossCoefficient": 0.01},
    "frozen router": {"freezeRouter": True},
}


@pytest.mark.parametrize("how", make_rows(EVEN, ("moving bias",)))
def test_what_keeps_experts_even_works_as_on_whole_stages(worlds: Worlds, reference: Reference, how: str) -> None:
    moe = EVEN[how]
    folder, _ = reference(Family.DEEPSEEK_V3)
    cells = [
        Cell(Family.DEEPSEEK_V3, {"parallelism": MIXED, "moe": moe}),
        _cell(Family.DEEPSEEK_V3, MIXED, {"moe": moe}),
    ]
    whole, shares = (worlds.run(4, train_cell, cell, folder)[0] for cell in cells)
    np.testing.assert_allclose(shares.steps.losses, whole.steps.losses, rtol=WITHIN)
    np.testing.assert_allclose(shares.steps.norms, whole.steps.norms, rtol=WITHIN)
    np.testing.assert_allclose(shares.steps.balancing, whole.steps.balancing, rtol=WITHIN)
    assert shares.selection_biases == whole.selection_biases


def test_gradients_that_are_averaged_are_seen(worlds: Worlds, reference: Reference) -> None:
    cell = _cell(Family.QWEN3_MOE, {"data": 2})
    folder, expected = reference(cell.family)
    with pytest.raises(AssertionError, match=r"off by|Not equal"):
        assert_like(worlds.run(2, trained_on_averages, cell, folder), expected, within=WITHIN)


def trained_on_averages(cell: Cell, folder: Path) -> Any:
    """Train as torch does by itself: on averages."""
    ours = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = _averages  # type: ignore[assignment, method-assign]
    try:
        return train_cell(cell, folder)
    finally:
        FSDPModule.set_gradient_divide_factor = ours  # type: ignore[method-assign]


def _averages(module: FSDPModule, factor: float) -> None:
    """The factor that torch takes when it is given none."""


IN_BFLOAT16 = {
    "model": {"dtype": "bfloat16"},
    # One micro batch on each rank: replicas add two gradients either way, and nothing is added to the sums. Norms are
    # summed piece by piece, and pieces differ, so nothing is clipped.
    "training": {"precision": {"gradients": "bfloat16"}, "microBatchSize": 4, "clipGrad": 1e6},
    "parallelism": {"data": 2},
}


@pytest.mark.parametrize("sections", [SHARDED, ZERO2], ids=["FSDP", "ZeRO-2"])
def test_shares_in_bfloat16_train_what_whole_stages_train_to_the_bit(
    worlds: Worlds, reference: Reference, sections: Mapping[str, Any]
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    whole = worlds.run(2, after_updates, Cell(Family.QWEN3_MOE, IN_BFLOAT16), folder)[0]
    for shares in worlds.run(2, after_updates, Cell(Family.QWEN3_MOE, merge_sections(sections, IN_BFLOAT16)), folder):
        assert shares == whole


def after_updates(cell: Cell, folder: Path) -> list[float]:
    """Losses of one rank, each after the updates before it."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        loss = make_loss(cell, engine)
        found = [engine.update(micro_batches(cell, engine, step), loss).loss for step in range(STEPS)]
        if cell.spec().memory.sharding.has_weight_shards:
            assert {local_part(parameter).dtype for parameter in engine.stages[0].parameters()} == {torch.bfloat16}
        return found
    finally:
        stop_groups()


# --- checkpoints ----------------------------------------------------------------------------------------------------

EP4 = {"data": 4, "expert": 4, **FOLDED}
KINDS: dict[str, tuple[Family, dict[str, Any], float]] = {
    "Qwen3-MoE": (Family.QWEN3_MOE, {}, 1e-6),
    "DeepSeek-V3 with moving bias": (Family.DEEPSEEK_V3, {"moe": {"balancing": "ExpertBias"}}, 1e-6),
    "frozen router": (Family.QWEN3_MOE, {"moe": {"freezeRouter": True}}, 1e-6),
    "tied Qwen2": (Family.QWEN2, {}, 1e-6),
    "bfloat16": (
        Family.QWEN3_MOE,
        {"model": {"dtype": "bfloat16"}, "training": {"precision": {"moments": "bfloat16"}}},
        5e-3,
    ),
}
ALWAYS = "DeepSeek-V3 with moving bias"
# Ways that write, and those that read what all of these have written.
EVERY = ("shares", "shares of a mix", "ZeRO-2", "TP2", "PP2")
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "some ways": (("shares", "ZeRO-2", "TP2"), ("shares", "TP2")),
    "all ways": (EVERY, EVERY),
}


@pytest.mark.parametrize(
    ("name", "extent"),
    make_rows([(ALWAYS, "some ways"), *((name, "all ways") for name in KINDS)], [(ALWAYS, "some ways")]),
)
def test_checkpoints_of_shares_and_of_whole_stages_are_the_same(
    worlds: Worlds, reference: Reference, tmp_path: Path, name: str, extent: str
) -> None:
    family, sections, within = KINDS[name]
    first, _ = reference(family)
    mixed = {"tensor": 2, "data": 3} if family is Family.QWEN2 else EP4
    ways = {
        "shares": _cell(family, {"data": 3}, sections),
        "shares of a mix": _cell(family, mixed, sections),
        "ZeRO-2": _cell(family, {"data": 2}, merge_sections(ZERO2, sections)),
        "TP2": Cell(family, merge_sections({"parallelism": {"tensor": 2}}, sections)),
        "PP2": Cell(family, merge_sections({"parallelism": {"pipeline": 2}}, sections)),
    }
    writers, readers = WAYS[extent]
    written = {
        way: worlds.run(ways[way].ranks(), train_and_save, ways[way], first, tmp_path / way)[0] for way in writers
    }
    for way in readers:
        cell = ways[way]
        others = {other: Resumption(one, tmp_path / "again" / way / other) for other, one in written.items()}
        found = worlds.run(cell.ranks(), resume_runs, cell, first, [*others.values()])[0]
        for (other, resumption), losses in zip(others.items(), found, strict=True):
            assert unequal_names(state_in(resumption.again), state_in(resumption.saved.folder)) == [], (
                f"{other} in {way}"
            )
            is_same = other == way
            np.testing.assert_allclose(losses, resumption.saved.losses, rtol=0.0 if is_same else within, err_msg=other)


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["DP3", "EP2.DP2", "TP2.CP2.EP4 folded over TP2.CP2.DP2"])
def test_weights_are_handed_out_as_they_were_read(
    worlds: Worlds, reference: Reference, layout: str, dtype: str
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    sections = {"model": {"dtype": dtype}}
    whole = worlds.run(1, hand_out_weights, Cell(Family.QWEN3_MOE, sections), folder)[0]
    cell = _cell(Family.QWEN3_MOE, LAYOUTS[layout], sections)
    parts = worlds.run(cell.ranks(), hand_out_weights, cell, folder)
    assert sum(len(part) for part in parts) == len(whole), "somebody was handed a weight that another has"
    found = {name: tensor for part in parts for name, tensor in part.items()}
    assert found.keys() == whole.keys()
    differing = [name for name in whole if not (whole[name] == found[name]).all()]
    assert differing == []


def hand_out_weights(cell: Cell, folder: Path) -> dict[str, Any]:
    """Return the weights that one rank gets."""
    use_cpu()
    try:
        # As bits: numpy knows no bfloat16.
        return {
            name: _bits(tensor) for name, tensor in start_engine(cell, folder).export_weights() if not tensor.is_meta
        }
    finally:
        stop_groups()


@pytest.mark.parametrize("sections", [SHARDED, ZERO2], ids=["FSDP", "ZeRO-2"])
def test_fresh_weights_and_adapters_begin_with_what_they_compute_with(
    worlds: Worlds, reference: Reference, sections: Mapping[str, Any]
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    begun = {"model": {"dtype": "bfloat16"}, "training": {"lora": {"rank": 4}}, "parallelism": {"data": 2}}
    cell = Cell(Family.QWEN3_MOE, merge_sections(sections, begun))
    for begins_with_more in worlds.run(2, with_more_bits, cell, folder):
        assert begins_with_more == []


def with_more_bits(cell: Cell, folder: Path) -> list[str]:
    """Return the fresh tensors of a rank whose shares are not in the type that they compute in."""
    use_cpu()
    try:
        stages, groups, model = build_cell_stages(cell, folder)
        named = named_weights(stages)
        adapters = build_adapter_table(model.shape, cell.spec().training.lora or Lora()).parameters
        initialise_weights(stages, model_parameters(model.shape), groups, seed=1)
        initialise_adapters(stages, adapters, groups, seed=1)
        assert {parameter.name for parameter in adapters} <= named.keys()
        divided = {name: (local_part(tensor), find_sharding(tensor)) for name, tensor in named.items()}
        assert all(sharded is not None for _, sharded in divided.values())
        return [
            name
            for name, (share, sharded) in divided.items()
            if sharded is not None and not torch.equal(share, share.to(sharded.dtype).float())
        ]
    finally:
        stop_groups()


def _bits(tensor: Tensor) -> Any:
    as_bits = torch.int32 if tensor.dtype is torch.float32 else torch.int16
    return tensor.contiguous().view(as_bits).numpy().copy()


# --- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """Of tensors that a rank holds, and of all weights of the model, which are float32."""

    begun: int
    updated: int
    evaluate: int
    most_inside: int
    model: int


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [pytest.param(2, {}, id="2"), pytest.param(4, {}, id="4"), pytest.param(4, ZERO2, id="4, gathered once a step")],
)
def test_a_rank_holds_its_share_alone_outside_of_the_passes(
    worlds: Worlds, reference: Reference, ranks: int, sections: Mapping[str, Any]
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    for held in worlds.run(ranks, bytes_held, _cell(Family.QWEN3_MOE, {"data": ranks}, sections), folder):
        # Weights, gradients and both moments; what counts tokens and rows that cannot be divided come on top.
        most = 4 * held.model / ranks * 1.04
        assert held.begun <= most
        assert held.updated <= most
        assert held.evaluate <= most
        assert held.most_inside > held.updated + held.model / 10


@pytest.mark.parametrize(
    ("family", "sections", "is_once"),
    [
        pytest.param(Family.QWEN3, {}, False, id="a dense layer twice a micro batch"),
        pytest.param(Family.QWEN3_MOE, {}, True, id="what a mixture has beside its experts once"),
        pytest.param(Family.QWEN3, ZERO2, True, id="a dense layer once under ZeRO-2"),
    ],
)
def test_a_layer_is_gathered_for_every_pass_or_once_a_step(
    worlds: Worlds, reference: Reference, family: Family, sections: Mapping[str, Any], is_once: bool
) -> None:
    folder, _ = reference(family)
    cell = _cell(family, {"data": 2}, merge_sections(sections, {"training": {"microBatchSize": 1}}))
    found = worlds.run(2, count_gathers, cell, folder)[0]
    assert found.micro_batches > 1
    assert found.of_a_layer == (1 if is_once else 2 * found.micro_batches)


@dataclass(frozen=True)
class Gathers:
    """Of the weights of one layer in a step, beside the micro batches of the step."""

    of_a_layer: int
    micro_batches: int


def count_gathers(cell: Cell, folder: Path) -> Gathers:
    """One rank's part."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        layer = engine.stages[0].get_submodule("layers.1")
        assert isinstance(layer, FSDPModule)
        group = layer._get_fsdp_state()._fsdp_param_group  # noqa: SLF001  # torch counts no gathers itself
        assert group is not None
        batches = micro_batches(cell, engine, 0)
        with patch.object(group, "_to_unsharded", wraps=group._to_unsharded) as gathered:  # noqa: SLF001
            engine.update(batches, make_loss(cell, engine))
    finally:
        stop_groups()
    return Gathers(gathered.call_count, len(batches))


def test_whole_stages_hold_weights_and_gradients_whole(worlds: Worlds, reference: Reference) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    cell = Cell(Family.QWEN3_MOE, {"parallelism": {"data": 4}})
    for held in worlds.run(4, bytes_held, cell, folder):
        assert held.updated > 2 * held.model


def bytes_held(cell: Cell, folder: Path) -> Bytes:
    """One rank's part."""
    use_cpu()
    before = _bytes()
    engine = start_engine(cell, folder)
    inside: list[int] = []
    try:
        begun = _bytes() - before
        batches, loss = micro_batches(cell, engine, 0), make_loss(cell, engine)
        attention = engine.stages[0].get_submodule("layers.1.attention")
        hook = attention.register_forward_hook(lambda *_: inside.append(_bytes() - before))
        engine.update(batches, loss)
        hook.remove()
        updated = _bytes() - before
        engine.evaluate(batches, loss)
        engine.compute_outputs(batches)
        evaluate = _bytes() - before
    finally:
        stop_groups()
    declared = (parameter for parameter in build_tensor_table(engine.model.shape).parameters if not parameter.is_buffer)
    return Bytes(begun, updated, evaluate, max(inside), sum(4 * math.prod(one.shape) for one in declared))


def _bytes() -> int:
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, Tensor) and not isinstance(found, DTensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_stages_of_shares_begin_with_the_counters_of_whole_ones(worlds: Worlds, reference: Reference) -> None:
    folder, _ = reference(Family.DEEPSEEK_V3)
    cells = [Cell(Family.DEEPSEEK_V3, {"parallelism": {"data": 2}}), _cell(Family.DEEPSEEK_V3, {"data": 2})]
    whole, shares = (worlds.run(2, read_counters, cell, folder)[0] for cell in cells)
    assert shares == whole
    assert len(shares) > 10


def read_counters(cell: Cell, folder: Path) -> dict[str, tuple[str, list[float]]]:
    """All buffers of a stage that has not trained yet."""
    use_cpu()
    try:
        buffers = start_engine(cell, folder).stages[0].named_buffers()
        return {name: (str(buffer.dtype), buffer.flatten().tolist()) for name, buffer in buffers}
    finally:
        stop_groups()
