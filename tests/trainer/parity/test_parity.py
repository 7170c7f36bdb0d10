"""Every layout trains the model that Transformers trains in one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from builders import merge_sections
from moejob_api.job.model import Implementation
from moejob_api.models.shape import Family
from moejob_api.models.trainable import MEGATRON_FAMILIES
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from trainer.parity.cells import (
    ALIKE,
    FOLDED,
    LAYOUTS,
    MODELS,
    Cell,
    assert_like,
    build_cell_stages,
    measure_update,
    relative_errors,
    train_cell,
    write_reference,
)
from trainer.parity.matrix import MATRIX, Entry
from trainer.parity.references import Reference
from trainer.rows import make_rows
from trainer.worlds import Worlds

Recorded = Callable[[str, object], None]

# Relative, of losses and gradient norms in float32.
WITHIN = 1e-5
PARITY = "against Transformers: relative error of losses, gradient norms, gradients, weights"
TRAINED: dict[str, dict[str, Any]] = ALIKE | {
    "documents apart": {"data": {"packing": False}, "training": {"microBatchSize": 2}},
    "batches by tokens": {"training": {"dynamicBatchTokens": 48}},
}
# Full recomputation is a row of most other tables, and each module has a row of its own below.
ELSEWHERE = ("everything recomputed", "norms and activations recomputed")
# A module, and a family that has it.
RECOMPUTED: dict[str, Family] = {
    "CoreAttention": Family.QWEN3_MOE,
    "LatentUpProjection": Family.DEEPSEEK_V3,
    "Norms": Family.QWEN3_MOE,
    "MLP": Family.DEEPSEEK_V3,
    "ExpertInput": Family.QWEN3_MOE,
    "ExpertActivation": Family.QWEN3_MOE,
    "SharedExperts": Family.DEEPSEEK_V3,
    "Experts": Family.QWEN3_MOE,
}
# Ranks that hold tokens of their own in every way, and share experts in both.
GATHERED: dict[str, dict[str, Any]] = {
    "EP2": {"expert": 2},
    "ETP2 folded": {"data": 2, "expertTensor": 2, **FOLDED},
    "TP2.EP2.ETP2 folded over TP2.DP2": {"tensor": 2, "data": 2, "expert": 2, "expertTensor": 2, **FOLDED},
    "TP2.CP2.EP4 folded over TP2.CP2": {"tensor": 2, "context": 2, "expert": 4, **FOLDED},
}

# Ranks that write to one another in every way that experts are divided.
WRITTEN: dict[str, dict[str, Any]] = {
    **{name: layout for name, layout in LAYOUTS.items() if "EP" in name and "ETP" not in name},
    "EP2.DP2": {"expert": 2, "data": 2},
    "PP2.VPP2.EP2": {"pipeline": 2, "virtualPipeline": 2, "expert": 2},
    "TP2.EP2.ETP2 folded over TP2.DP2": {"tensor": 2, "data": 2, "expert": 2, "expertTensor": 2, **FOLDED},
}

# Nodes of two ranks, of which each expert group has several.
OVER_NODES: dict[str, dict[str, Any]] = {
    "EP4": {"expert": 4},
    "TP2.EP4 folded over TP2.DP2": {"tensor": 2, "data": 2, "expert": 4, **FOLDED},
    "CP2.EP4 folded over CP2.DP2": {"context": 2, "data": 2, "expert": 4, **FOLDED},
    "PP2.EP4": {"pipeline": 2, "expert": 4},
}

MEGATRON: dict[str, Any] = {"model": {"implementation": "Megatron"}}
NATIVE: dict[str, Any] = {}
# Megatron ranks a group by as many experts as a token takes of each kept group; two are what the model's code takes.
CHANGED: dict[Family, dict[str, Any]] = {Family.GLM4_MOE: {"num_experts_per_tok": 4}}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
IMPLEMENTATIONS = {"": NATIVE, "Megatron": MEGATRON}

# Every layout of one family, each way of dividing a model for another, and for the rest what their layers may break.
DIVIDED = ("TP2", "PP2.VPP2", "EP2", "CP2", "ETP2 folded")
NEWER = (Family.GLM4_MOE_LITE, Family.OLMOE, Family.ERNIE4_5_MOE, Family.MINIMAX_M2)
# The state of linear attention passes through the whole row.
WITHOUT_CONTEXT = [layout for layout in LAYOUTS if "CP" not in layout]
ALWAYS = [
    *product(NEWER, ("TP2", "EP2")),
    *product((Family.QWEN3_5_MOE,), ("TP2", "TP2.PP2.EP2")),
    *product((Family.QWEN3_NEXT,), ("TP2", "ETP2 folded", "TP2.PP2.EP2")),
    *((Family.QWEN3_MOE, layout) for layout in LAYOUTS),
    *((Family.DEEPSEEK_V3, layout) for layout in (*DIVIDED, "TP2.PP2.EP2")),
    *product((Family.MIXTRAL,), ("TP2", "CP2")),
]

ALWAYS_MEGATRON = [
    *product((Family.QWEN3_MOE,), (*DIVIDED, "DP2", "TP2.PP2.EP2")),
    (Family.LLAMA, "CP2"),
    (Family.QWEN3, "PP2"),
    (Family.QWEN2, "TP2"),
    (Family.GLM4_MOE, "TP2.PP2.EP2"),
    (Family.MIXTRAL, "CP2"),
    (Family.QWEN2_MOE, "TP2"),
    *product((Family.OLMOE, Family.ERNIE4_5_MOE, Family.MINIMAX_M2), ("TP2", "EP2")),
    *product((Family.GPT_OSS,), ("EP2", "CP2")),
]


def _is_divisible(family: Family, layout: str) -> bool:
    """Return whether a layout divides the family: biases of experts are not cut over tensor ranks."""
    return family is not Family.GPT_OSS or Cell(family, {"parallelism": LAYOUTS[layout]}).layout().expert_tensor == 1


def _assert_like_reference(worlds: Worlds, reference: Reference, cell: Cell) -> tuple[float, ...]:
    """Holds the cell against its reference; how far it is from it."""
    is_megatron = cell.spec().model.implementation is Implementation.MEGATRON
    folder, expected = reference(cell.family, **(CHANGED.get(cell.family, {}) if is_megatron else {}))
    found = worlds.run(cell.ranks(), train_cell, cell, folder)
    assert_like(found, expected, within=WITHIN)
    return relative_errors(found, expected)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*product(MODELS, [""]), *product(sorted(MEGATRON_FAMILIES), ["Megatron"])],
)
def test_one_rank_trains_what_transformers_trains(
    worlds: Worlds, reference: Reference, family: Family, implementation: str, record_property: Recorded
) -> None:
    errors = _assert_like_reference(worlds, reference, Cell(family, IMPLEMENTATIONS[implementation]))
    record_property(MATRIX, Entry(PARITY, f"one rank {implementation}".strip(), family, errors).as_json)


@pytest.mark.parametrize(
    ("family", "layout", "implementation"),
    make_rows(
        [
            *product((Family.QWEN3_MOE, Family.MIXTRAL, Family.DEEPSEEK_V3, *NEWER), LAYOUTS, [""]),
            *product((Family.QWEN3_NEXT, Family.QWEN3_5_MOE), WITHOUT_CONTEXT, [""]),
            *(row for row in product(sorted(MEGATRON_FAMILIES), LAYOUTS, ["Megatron"]) if _is_divisible(*row[:2])),
        ],
        [*((*row, "") for row in ALWAYS), *((*row, "Megatron") for row in ALWAYS_MEGATRON)],
    ),
)
def test_a_layout_trains_what_transformers_trains(
    worlds: Worlds, reference: Reference, family: Family, layout: str, implementation: str, record_property: Recorded
) -> None:
    sections = {"parallelism": LAYOUTS[layout], **IMPLEMENTATIONS[implementation]}
    errors = _assert_like_reference(worlds, reference, Cell(family, sections))
    record_property(MATRIX, Entry(PARITY, f"{layout} {implementation}".strip(), family, errors).as_json)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param(Family.GPT_OSS, {"rope_scaling": YARN}, id="gpt-oss, YaRN"),
        pytest.param(Family.QWEN3_MOE, {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}}, id="mscales"),
        pytest.param(Family.MIXTRAL, {"sliding_window": 6}, id="windows"),
    ],
)
def test_megatrons_layers_obey_what_a_config_says(
    worlds: Worlds, tmp_path: Path, family: Family, changes: dict[str, Any]
) -> None:
    expected = write_reference(family, tmp_path, **changes)
    assert_like(worlds.run(1, train_cell, Cell(family, MEGATRON), tmp_path), expected, within=WITHIN)


@pytest.mark.parametrize("how", make_rows(TRAINED, [how for how in TRAINED if how not in ELSEWHERE]))
def test_how_memory_is_saved_and_batches_are_made_changes_nothing(
    worlds: Worlds, reference: Reference, how: str
) -> None:
    parallelism = {"parallelism": {"tensor": 2, "expert": 2, "expertLayout": "Folded"}}
    _assert_like_reference(worlds, reference, Cell(Family.QWEN3_MOE, parallelism | TRAINED[how]))


@pytest.mark.parametrize("module", RECOMPUTED)
def test_computing_a_module_again_changes_nothing(worlds: Worlds, reference: Reference, module: str) -> None:
    parallelism = {"parallelism": {"tensor": 2, "expert": 2, "expertLayout": "Folded"}}
    again = {"training": {"recompute": {"granularity": "Selective", "modules": [module]}}}
    _assert_like_reference(worlds, reference, Cell(RECOMPUTED[module], parallelism | again))


@pytest.mark.parametrize(
    ("family", "layout"),
    make_rows(
        product((Family.QWEN3_MOE, Family.GPT_OSS), GATHERED),
        [*product((Family.QWEN3_MOE,), GATHERED), (Family.GPT_OSS, "EP2"), (Family.GPT_OSS, "ETP2 folded")],
    ),
)
def test_gathering_tokens_is_the_same_as_exchanging_them(
    worlds: Worlds, reference: Reference, family: Family, layout: str
) -> None:
    _assert_like_reference(
        worlds, reference, Cell(family, {"parallelism": GATHERED[layout], "moe": {"dispatcher": "AllGather"}})
    )


@pytest.mark.parametrize(
    ("family", "layout", "how"),
    make_rows(
        [
            *product((Family.QWEN3_MOE, Family.GPT_OSS, Family.DEEPSEEK_V3), WRITTEN, [""]),
            *product((Family.QWEN3_MOE,), ("EP2",), ALIKE),
        ],
        [
            *((Family.QWEN3_MOE, layout, "") for layout in ("PP2.VPP2.EP2", "TP2.EP2.ETP2 folded over TP2.DP2")),
            *((Family.QWEN3_MOE, "EP2", how) for how in ("everything recomputed", "norms and activations recomputed")),
        ],
    ),
)
def test_writing_tokens_into_the_memory_of_others_is_the_same_as_exchanging_them(
    worlds: Worlds, reference: Reference, family: Family, layout: str, how: str
) -> None:
    sections = {"parallelism": WRITTEN[layout], "moe": {"dispatcher": "Flex"}}
    _assert_like_reference(worlds, reference, Cell(family, merge_sections(sections, ALIKE.get(how, {}))))


@pytest.mark.parametrize(
    ("family", "layout", "how"),
    make_rows(
        [
            *product((Family.QWEN3_MOE, Family.GPT_OSS, Family.DEEPSEEK_V3), OVER_NODES, [""]),
            *product((Family.QWEN3_MOE,), ("EP4",), ALIKE),
        ],
        [
            *((Family.QWEN3_MOE, layout, "") for layout in ("EP4", "TP2.EP4 folded over TP2.DP2")),
            *((Family.QWEN3_MOE, "EP4", how) for how in ("everything recomputed", "norms and activations recomputed")),
        ],
    ),
)
def test_sending_tokens_to_nodes_first_is_the_same_as_sending_them_to_ranks(
    worlds: Worlds, reference: Reference, family: Family, layout: str, how: str
) -> None:
    sections = {"parallelism": OVER_NODES[layout], "moe": {"dispatcher": "Flex"}, "resources": {"gpusPerNode": 2}}
    _assert_like_reference(worlds, reference, Cell(family, merge_sections(sections, ALIKE.get(how, {}))))


def memory_bytes(cell: Cell, folder: Path) -> int:
    """Bytes of this rank that its peers write to."""
    use_cpu()
    try:
        [stage], _, _ = build_cell_stages(cell, folder)
        memory = stage.groups.expert_memory
        assert memory is None or len(memory.shares) == 2
        return 0 if memory is None else memory.shares[memory.rank].numel()
    finally:
        stop_groups()


@pytest.mark.parametrize(
    ("layout", "dispatcher", "expected"),
    [
        # Micro batches of 32 tokens of 32 numbers in float32, of both ranks.
        pytest.param({"expert": 2}, "Flex", 2 * 32 * 32 * 4, id="experts divided"),
        pytest.param({"tensor": 2, "expert": 2, **FOLDED}, "Flex", 2 * 16 * 32 * 4, id="tokens divided over TP2"),
        pytest.param({"expert": 2}, "AllToAll", 0, id="tokens exchanged"),
        pytest.param({"data": 2}, "Flex", 0, id="experts whole"),
        pytest.param({"expert": 4}, "Flex", 4 * 32 * 32 * 4, id="tokens of the other node too"),
    ],
)
def test_ranks_whose_experts_are_divided_have_memory_that_peers_write_to(
    worlds: Worlds, reference: Reference, layout: dict[str, Any], dispatcher: str, expected: int
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    sections = {"parallelism": layout, "moe": {"dispatcher": dispatcher}, "resources": {"gpusPerNode": 2}}
    cell = Cell(Family.QWEN3_MOE, sections)
    assert worlds.run(cell.ranks(), memory_bytes, cell, folder) == [expected] * cell.ranks()


def test_tokens_over_capacity_are_dropped_alike_where_they_visit_nodes_first(
    worlds: Worlds, reference: Reference
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    sections: dict[str, Any] = {"parallelism": {"expert": 4}, "resources": {"gpusPerNode": 2}}
    nodes, straight = (
        worlds.run(4, train_cell, Cell(Family.QWEN3_MOE, sections | {"moe": moe}), folder)
        for moe in ({"capacityFactor": 1.0, "dispatcher": way} for way in ("Flex", "AllToAll"))
    )
    for one, other in zip(nodes, straight, strict=True):
        assert one.steps.losses == pytest.approx(other.steps.losses, rel=WITHIN)
        assert one.steps.norms == pytest.approx(other.steps.norms, rel=WITHIN)


def test_tokens_over_capacity_are_dropped_alike_by_either_way(worlds: Worlds, reference: Reference) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    written, exchanged = (
        worlds.run(2, train_cell, Cell(Family.QWEN3_MOE, {"parallelism": {"expert": 2}, "moe": moe}), folder)
        for moe in ({"capacityFactor": 1.0, "dispatcher": way} for way in ("Flex", "AllToAll"))
    )
    # To the last bit, of losses and of norms of gradients.
    assert [found.steps for found in written] == [found.steps for found in exchanged]


def test_every_rank_says_which_share_of_choices_was_dropped(worlds: Worlds, reference: Reference) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    rates = []
    for factor in (0.5, 8.0):
        layout = {"tensor": 2, "expert": 2, **FOLDED}
        cell = Cell(Family.QWEN3_MOE, {"parallelism": layout, "moe": {"capacityFactor": factor}})
        rates.append([metrics["dropRate"] for metrics in worlds.run(2, measure_update, cell, folder)])
    # Half an even share drops at least half, but for what padding left free.
    assert rates[0][0] == rates[0][1]
    assert 0.3 < rates[0][0] < 0.9
    assert rates[1] == [0.0, 0.0]


# --- the matrix cannot lie ------------------------------------------------------------------------------------------

MUTANTS = ("gradients over DP", "theta 10000", "two experts swapped", "mask shifted", "a layer skipped")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_made_on_purpose_is_seen(worlds: Worlds, reference: Reference, mutant: str) -> None:
    cell = Cell(Family.QWEN3_MOE, {"parallelism": {"data": 2}}, mutant)
    with pytest.raises(AssertionError, match=r"off by|Not equal"):
        _assert_like_reference(worlds, reference, cell)


# Mistakes that one family alone makes room for.
MUTANTS_OF_FAMILIES = [
    (Family.ERNIE4_5_MOE, "choice without its bias"),
    (Family.ERNIE4_5_MOE, "halves turned"),
    (Family.ERNIE4_5_MOE, "shared experts skipped"),
    (Family.ERNIE4_5_MOE, "weights not divided by their sum"),
    (Family.OLMOE, "heads normed apart"),
    (Family.MINIMAX_M2, "choice without its bias"),
    (Family.MINIMAX_M2, "whole heads turned"),
    (Family.MINIMAX_M2, "heads normed apart"),
]


@pytest.mark.parametrize(("family", "mutant"), MUTANTS_OF_FAMILIES)
def test_a_mistake_in_what_a_family_computes_is_seen(
    worlds: Worlds, reference: Reference, family: Family, mutant: str
) -> None:
    cell = Cell(family, {"parallelism": {"tensor": 2}}, mutant)
    with pytest.raises(AssertionError, match=r"off by|Not equal"):
        _assert_like_reference(worlds, reference, cell)
