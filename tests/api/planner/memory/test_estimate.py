"""The memory estimate: numbers worked out by hand, published anchors, and what must never happen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import dense_model, latent_model, merge_sections, moe_model, spec
from moejob_api.derived import trained_shape
from moejob_api.hardware import memory_limit_bytes
from moejob_api.job import Spec
from moejob_api.layout.sizes import derive_layout
from moejob_api.models.parameters import mtp_parameters, total_parameters
from moejob_api.models.shape import DenseMLP, Experts, Family, GroupedAttention, Layer, ModelShape
from moejob_api.planner.memory import (
    MemoryEstimate,
    MemoryUse,
    VolumeNeed,
    checkpoint_bytes,
    download_bytes,
    estimate_memory,
    export_bytes,
    volume_need,
)
from moejob_api.planner.memory.case import prepare_case, stage_parameters
from moejob_api.planner.memory.remedies import find_remedies
from moejob_api.planner.memory.temporaries import working_bytes

GIB = 2**30
# 2 heads of 4, so queries 8x8, keys and values 8x4 each, output 8x8; a network of 3 x 8x16; two norms of 8.
TINY_LAYER = 64 + 2 * 32 + 64 + 3 * 128 + 16
TINY = ModelShape(Family.LLAMA, 8, 256, False, 1024, (Layer(GroupedAttention(2, 1, head_dim=4), DenseMLP(16)),) * 2)
# The same attention; 4 experts of 3 x 8x16 and a router of 8x4.
TINY_MIXTURE = ModelShape(
    Family.MIXTRAL, 8, 256, False, 1024, (Layer(GroupedAttention(2, 1, head_dim=4), Experts(4, 2, 16)),) * 2
)
TINY_ROUTED = 4 * 3 * 128
ENDS = 2 * 256 * 8 + 8


def needs(job: Spec, shape: ModelShape) -> MemoryEstimate:
    return estimate_memory(job, shape, derive_layout(job.parallelism, job.resources.gpus_per_node))


def part(answer: MemoryEstimate, name: MemoryUse) -> int:
    return sum(part.bytes for part in answer.parts if part.name is name)


def test_a_tiny_dense_model_by_hand() -> None:
    held = 2 * TINY_LAYER + ENDS
    answer = needs(spec(), TINY)
    assert part(answer, MemoryUse.WEIGHTS) == 2 * held
    assert part(answer, MemoryUse.GRADIENTS) == 4 * held
    # Two moments in float32, and the 16 bits that weights in bfloat16 lack.
    assert part(answer, MemoryUse.OPTIMIZER) == 10 * held


def test_a_tiny_mixture_by_hand() -> None:
    dense = 2 * (TINY_LAYER - 3 * 128 + 8 * 4) + ENDS
    routed = 2 * TINY_ROUTED
    # Two groups of experts, each once more: dense parts have four replicas, experts two.
    answer = needs(spec(parallelism={"expert": 2, "data": 2}), TINY_MIXTURE)
    assert part(answer, MemoryUse.WEIGHTS) == 2 * (dense + routed // 2)
    assert part(answer, MemoryUse.OPTIMIZER) == 10 * (-(-dense // 4) + routed // 2 // 2)


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        # In host memory between its passes; in a pass it is in the model, and the trained weights wait.
        pytest.param("GPU", {"forward and backward": 0, "optimizer step": 0, "scoring": 1}, id="GPU"),
        pytest.param("CPU", {"forward and backward": 1, "optimizer step": 1, "scoring": 2}, id="CPU"),
    ],
)
def test_a_reference_model_takes_its_weights_where_it_waits_and_where_it_computes(
    accelerator: str, expected: dict[str, int]
) -> None:
    engines = {"placement": "Separate", "replicas": 1}
    job = spec(
        method="GRPO",
        training={"globalBatchSize": None},
        grpo={"kl": {"coefficient": 0.05}, "rewards": [{"name": "exact-match"}], "rollout": engines},
        resources={"accelerator": accelerator},
    )
    answer, weights = needs(job, TINY), 2 * (2 * TINY_LAYER + ENDS)
    counted = {
        str(phase.phase): sum(part.bytes for part in phase.parts if part.name is MemoryUse.REFERENCE) // weights
        for phase in answer.phases
    }
    assert counted == expected


@pytest.mark.parametrize(
    ("dtype", "gradients"),
    [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")],
)
def test_divided_weights_are_of_the_type_of_their_gradients_and_whole_layers_are_not(
    dtype: str, gradients: str
) -> None:
    dense = 2 * (TINY_LAYER - 3 * 128 + 8 * 4) + ENDS
    routed = 2 * TINY_ROUTED
    precision = {"training": {"precision": {"gradients": gradients}}, "model": {"dtype": dtype}}
    job = spec(parallelism={"expert": 2, "data": 2}, memory={"sharding": "FSDP"}, **precision)
    answer = needs(job, TINY_MIXTURE)
    mine = -(-dense // 4) + routed // 2 // 2
    share = 2 if dtype == gradients == "bfloat16" else 4
    assert part(answer, MemoryUse.WEIGHTS) == share * mine
    assert part(answer, MemoryUse.GRADIENTS) == share * mine
    # What weights in bfloat16 lack of float32, and two moments.
    assert part(answer, MemoryUse.OPTIMIZER) == (4 - share + 8) * mine
    element, summed = (2 if dtype == "bfloat16" else 4), (2 if gradients == "bfloat16" else 4)
    # Two layers on their way, one's gradients and what they are summed in; embedding and output beside them, and what
    # both layers have beside their experts: 480 parameters, where the experts of two layers are 1,536.
    beside_experts = TINY_LAYER - 3 * 128 + 8 * 4
    layer = beside_experts + TINY_ROUTED // 2
    behind_the_first_layer = 2 * 256 * 8 * summed
    assert part(answer, MemoryUse.GATHERED) == (2 * 2 * 256 * 8 + 2 * beside_experts) * element + max(
        layer * (3 * element + summed), behind_the_first_layer
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Both roundings of both layers, for four micro batches; embedding, output and the last norm have none.
        ({"training": {"globalBatchSize": 4}}, 2 * 2 * TINY_LAYER),
        ({"training": {"globalBatchSize": 1}}, 2 * 8 * 16),
        ({"training": {"globalBatchSize": 8}, "parallelism": {"data": 2}, "memory": {"sharding": "FSDP"}}, 2 * 8 * 16),
    ],
    ids=["for all micro batches", "for the only one", "of the largest matrix"],
)
def test_fp8_takes_a_byte_for_each_rounding_of_a_weight(changes: dict[str, Any], expected: int) -> None:
    plain = spec(**changes)
    rounded = spec(**merge_sections(changes, {"training": {"precision": {"compute": "FP8"}}}))
    assert part(needs(rounded, TINY), MemoryUse.ROUNDED) == expected
    assert part(needs(plain, TINY), MemoryUse.ROUNDED) == 0
    assert needs(rounded, TINY).bytes == needs(plain, TINY).bytes + expected


def test_fp8_rounds_the_widest_rows_of_a_layer_at_a_byte_a_number() -> None:
    cases = [
        prepare_case(spec(training={"precision": precision}), TINY_MIXTURE, derive_layout(spec().parallelism, 8))
        for precision in ({"compute": "FP8"}, {})
    ]
    rounded, plain = (working_bytes(TINY_MIXTURE.layers[0], case.share, case.activation_settings) for case in cases)
    # Both halves of the activation of two experts' rows for each token.
    assert rounded - plain == cases[0].share.tokens * 2 * 2 * 16


@pytest.mark.parametrize("sharding", ["FSDP", "ZeRO2"])
def test_divided_weights_under_adapters_take_the_models_type_and_have_no_gradients(sharding: str) -> None:
    lora = {"rank": 4, "targets": ["AttentionOutput"]}
    job = spec(
        parallelism={"data": 4},
        training={"lora": lora},
        model={"dtype": "bfloat16"},
        memory={"sharding": sharding},
    )
    answer = needs(job, TINY)
    adapter = 4 * (8 + 8)
    held, mine = 2 * (TINY_LAYER + adapter) + ENDS, 2 * adapter // 4
    assert part(answer, MemoryUse.WEIGHTS) == 2 * (-(-held // 4) - mine) + 4 * mine
    assert part(answer, MemoryUse.GRADIENTS) == 4 * mine
    assert part(answer, MemoryUse.OPTIMIZER) == 8 * mine
    # Whole are two layers, and embedding and output; or everything. Beside them gradients of one layer's adapters.
    whole = 2 * (TINY_LAYER + adapter) + 2 * 256 * 8 if sharding == "FSDP" else held
    assert part(answer, MemoryUse.GATHERED) == 2 * whole + (2 + 4) * adapter


def test_weights_that_stay_gathered_are_whole_in_the_models_type() -> None:
    job = spec(parallelism={"expert": 2, "data": 2}, memory={"sharding": "ZeRO2"}, model={"dtype": "bfloat16"})
    answer = needs(job, TINY_MIXTURE)
    layer = TINY_LAYER - 3 * 128 + 8 * 4 + TINY_ROUTED // 2
    held = 2 * layer + ENDS
    dense, routed = held - TINY_ROUTED, TINY_ROUTED
    mine = -(-dense // 4) + routed // 2
    assert part(answer, MemoryUse.WEIGHTS) == 4 * mine
    assert part(answer, MemoryUse.OPTIMIZER) == 8 * mine
    # Beside them the largest layer's gradients, and what these are summed in.
    assert part(answer, MemoryUse.GATHERED) == 2 * held + max(layer, 256 * 8) * (2 + 4)


@pytest.mark.parametrize(
    ("changes", "bytes_a_parameter"),
    [
        pytest.param({}, 2 + 4 + 10, id="mixed precision"),
        pytest.param({"training": {"precision": {"gradients": "bfloat16"}}}, 2 + 2 + 10, id="bfloat16 gradients"),
        pytest.param({"training": {"precision": {"moments": "bfloat16"}}}, 2 + 4 + 6, id="bfloat16 moments"),
        pytest.param({"memory": {"offloadOptimizer": 1.0}}, 2 + 4, id="optimizer in host memory"),
        pytest.param({"memory": {"offloadOptimizer": 0.5}}, 2 + 4 + 5, id="half of it"),
        pytest.param({"model": {"dtype": "float32"}}, 4 + 4 + 8, id="float32 needs no second copy"),
    ],
)
def test_a_parameter_of_one_gpu_takes_this_many_bytes(changes: dict[str, Any], bytes_a_parameter: int) -> None:
    shape = dense_model(layers=2)
    answer = needs(spec(**changes), shape)
    states = sum(part(answer, name) for name in (MemoryUse.WEIGHTS, MemoryUse.GRADIENTS, MemoryUse.OPTIMIZER))
    # Half a percent for the rows that pad the vocabulary.
    assert states == pytest.approx(bytes_a_parameter * total_parameters(shape), rel=0.005)


def test_llama_70b_on_16_gpus_takes_two_bytes_less_than_the_18_a_parameter_that_are_published() -> None:
    answer = needs(spec(parallelism={"tensor": 8, "pipeline": 2}), dense_model())
    states = sum(part(answer, name) for name in (MemoryUse.WEIGHTS, MemoryUse.GRADIENTS, MemoryUse.OPTIMIZER))
    assert states / GIB == pytest.approx(73.9 * 16 / 18, rel=0.02)


def test_deepseek_v3_on_64_gpus_holds_four_layers_by_hand() -> None:
    """The published 58.6 GiB are 671 B parameters shared evenly; a stage of four layers with experts holds more."""
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    beside = attention + 2 * 7168 + 3 * 7168 * 2048 + 256 * 7168
    of_gpu = 4 * (beside + 256 * 3 * 7168 * 2048 // 4)
    sizes = {
        "expertLayout": "Folded",
        "pipeline": 16,
        "data": 4,
        "expert": 4,
        "firstStageLayers": 3,
        "lastStageLayers": 2,
    }
    answer = needs(spec(parallelism=sizes, training={"recompute": {"granularity": "Full"}}), latent_model())
    assert answer.stage not in {0, 15}
    assert part(answer, MemoryUse.WEIGHTS) + part(answer, MemoryUse.GRADIENTS) == 6 * of_gpu


def test_mixtral_on_16_gpus_takes_two_bytes_a_parameter_less_than_was_published() -> None:
    mixtral = ModelShape(
        Family.MIXTRAL, 4096, 32_000, False, 32_768, (Layer(GroupedAttention(32, 8, 128), Experts(8, 2, 14_336)),) * 32
    )
    answer = needs(spec(parallelism={"tensor": 2, "pipeline": 2, "expert": 4}), mixtral)
    states = sum(part(answer, name) for name in (MemoryUse.WEIGHTS, MemoryUse.GRADIENTS, MemoryUse.OPTIMIZER))
    assert states / GIB == pytest.approx(48.9 * 16 / 18, rel=0.07)


SIZES = st.sampled_from((1, 2, 4))


@st.composite
def jobs(draw: st.DrawFn) -> Spec:
    recompute = draw(st.sampled_from(("None", "Selective", "Full")))
    method = draw(st.sampled_from(("SFT", "GRPO")))
    return spec(
        method=method,
        parallelism={"tensor": draw(SIZES), "pipeline": draw(SIZES), "expert": draw(SIZES), "data": draw(SIZES)},
        training={
            "globalBatchSize": 256,
            "microBatchSize": draw(st.sampled_from((1, 2))),
            "recompute": {"granularity": recompute},
            "lora": draw(st.sampled_from((None, {"rank": 16}))),
        },
        memory={"offloadActivations": draw(st.booleans()) and recompute != "Full"},
        moe={"dispatcher": draw(st.sampled_from(("AllToAll", "AllGather", "Flex")))},
    )


@settings(max_examples=80, deadline=None)
@given(jobs())
def test_parts_are_positive_and_add_up(job: Spec) -> None:
    answer = needs(job, moe_model(layers=16, experts=16))
    assert all(part.bytes > 0 for part in answer.parts)
    assert answer.bytes == sum(part.bytes for part in answer.parts) == max(peak.bytes for peak in answer.phases)
    assert all(part.why for part in answer.parts)


LIGHTER: dict[str, dict[str, Any]] = {
    "bfloat16 moments": {"training": {"precision": {"moments": "bfloat16"}}},
    "optimizer in host memory": {"memory": {"offloadOptimizer": 1.0}},
    "more replicas": {"parallelism": {"data": 8}},
}


@settings(max_examples=60, deadline=None)
@given(jobs(), st.sampled_from(sorted(LIGHTER)))
def test_what_should_save_memory_never_costs_any(job: Spec, name: str) -> None:
    shape = moe_model(layers=16, experts=16)
    parsed = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    lighter = spec(
        **{key: {**parsed.get(key, {}), **value} for key, value in LIGHTER[name].items()}, **rest(parsed, name)
    )
    assert without_communicators(needs(lighter, shape)) <= without_communicators(needs(job, shape))


def without_communicators(answer: MemoryEstimate) -> int:
    """More replicas talk to each other, which takes buffers of its own."""
    return max(sum(p.bytes for p in peak.parts if p.name is not MemoryUse.COMMUNICATORS) for peak in answer.phases)


def rest(parsed: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in parsed.items() if key not in LIGHTER[name]}


@pytest.mark.parametrize(
    ("sizes", "groups", "alone"),
    [
        pytest.param({}, 0, 0, id="one GPU talks to nobody"),
        pytest.param({"expert": 4}, 3, 3, id="the world, the data and the expert group of four"),
        pytest.param({"expert": 16}, 3, 7, id="of an expert group on two nodes, those of the own node"),
        pytest.param({"pipeline": 2, "tensor": 4}, 4, 1, id="one neighbour in the same node"),
        pytest.param({"pipeline": 2, "tensor": 8}, 4, 0, id="the neighbour on another node"),
    ],
)
def test_nccl_takes_what_was_measured(sizes: dict[str, int], groups: int, alone: int) -> None:
    answer = needs(spec(parallelism=sizes), moe_model(layers=4))
    assert part(answer, MemoryUse.COMMUNICATORS) == (groups * 484 + alone * 384) * 2**20


def test_tokens_that_visit_nodes_first_take_two_more_communicators() -> None:
    answer = needs(spec(parallelism={"expert": 16}, moe={"dispatcher": "Flex"}), moe_model(layers=4))
    assert part(answer, MemoryUse.COMMUNICATORS) == (5 * 484 + 7 * 384) * 2**20


@pytest.mark.parametrize(
    ("sizes", "tokens", "expected"),
    [
        pytest.param({"data": 4}, 4096, 0, id="experts that are not divided"),
        pytest.param({"expert": 4}, 4096, 4 * 4096 * 2048 * 2, id="every token of four ranks needs this one"),
        pytest.param({"expert": 4, "tensor": 2}, 4096, 4 * 2048 * 2048 * 2, id="tokens divided over tensor ranks"),
        pytest.param({"expert": 8}, 2**16, GIB, id="no more than a bound"),
        pytest.param({"expert": 16}, 4096, 16 * 4096 * 2048 * 2, id="experts over two nodes"),
        pytest.param({"expert": 12, "data": 2}, 4096, 0, id="unequal parts of a group on two nodes"),
    ],
)
def test_flex_takes_memory_that_peers_write_to(sizes: dict[str, int], tokens: int, expected: int) -> None:
    shape = moe_model(layers=4, experts=16)
    written, exchanged = (
        needs(spec(parallelism=sizes, data={"maxLength": tokens}, moe={"dispatcher": dispatcher}), shape)
        for dispatcher in ("Flex", "AllToAll")
    )
    assert part(written, MemoryUse.PEER_MEMORY) == expected
    assert without_communicators(written) - without_communicators(exchanged) == expected


@pytest.mark.parametrize(
    ("shape", "sections", "says"),
    [
        pytest.param(
            moe_model(),
            {"memory": {"offloadOptimizer": 1.0}, "parallelism": {"expert": 8}},
            "training.precision.gradients: bfloat16, grpo.rollout.tensor: 2",
            id="an engine of two GPUs",
        ),
        pytest.param(
            moe_model(),
            {
                "memory": {"offloadOptimizer": 1.0},
                "parallelism": {"expert": 8},
                "grpo": {"rollout": {"placement": "Separate", "gpuMemoryUtilization": 0.5}},
            },
            "grpo.rollout.gpuMemoryUtilization: 0.95",
            id="a larger share of each GPU",
        ),
        pytest.param(
            moe_model(),
            {"parallelism": {"expert": 8}, "grpo": {"rollout": {"placement": "Separate", "gpuMemoryUtilization": 0.5}}},
            "training.recompute.granularity: Full, grpo.rollout.tensor: 2",
            id="separate engines",
        ),
    ],
)
def test_an_engine_that_does_not_hold_the_model_has_a_remedy(
    shape: ModelShape, sections: dict[str, Any], says: str
) -> None:
    recompute = {"training": {"recompute": {"granularity": "Full"}}} if "memory" in sections else {}
    job = spec(method="GRPO", resources={"gpuType": "H100"}, **sections, **recompute)
    sizes, limit = derive_layout(job.parallelism, 8), memory_limit_bytes(job.resources)
    assert limit is not None
    remedies = find_remedies(job, shape, sizes, limit)
    assert says in [str(remedy) for remedy in remedies]
    for remedy in remedies:
        assert estimate_memory(remedy.spec, shape, sizes).is_within(limit)


def test_every_change_of_a_remedy_is_needed() -> None:
    job = spec(method="GRPO", resources={"gpuType": "H100"}, parallelism={"expert": 8})
    sizes, limit = derive_layout(job.parallelism, 8), memory_limit_bytes(job.resources)
    assert limit is not None
    (remedy,) = find_remedies(job, moe_model(), sizes, limit)
    assert len(remedy.options) > 2
    for option in remedy.options:
        changed = job
        for other in remedy.options:
            changed = changed if other is option else other.apply(changed)
        assert not estimate_memory(changed, moe_model(), sizes).is_within(limit)


def test_a_remedy_makes_the_job_fit() -> None:
    job, shape = spec(parallelism={"expert": 8}, resources={"gpuType": "H100"}), moe_model()
    sizes, limit = derive_layout(job.parallelism, 8), 79 * GIB
    found = find_remedies(job, shape, sizes, limit)
    assert found
    for remedy in found:
        assert estimate_memory(remedy.spec, shape, sizes).is_within(limit)
        assert str(remedy)


def test_a_job_that_lacks_the_memory_of_roundings_may_multiply_in_bfloat16() -> None:
    # Weights that do not change for many micro batches are rounded once: 9.3 GiB.
    training = {"precision": {"compute": "FP8"}, "microBatchSize": 1, "globalBatchSize": 8}
    job, shape = spec(training=training, resources={"gpuType": "H200"}), moe_model(layers=8)
    sizes = derive_layout(job.parallelism, 8)
    needed = needs(job, shape).bytes
    (found,) = (one for one in find_remedies(job, shape, sizes, needed - 1) if "precision.compute" in str(one))
    assert str(found) == "training.precision.compute: null"
    assert needed - found.bytes > 9 * GIB
    assert found.bytes == needs(found.spec, shape).bytes


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"training": {"mtpLossCoefficient": 0.0}}, id="a coefficient of 0"),
        pytest.param({"training": {"lora": {}}}, id="adapters"),
        pytest.param({"method": "GRPO", "training": {"globalBatchSize": None}}, id="reinforcement learning"),
    ],
)
def test_modules_for_further_tokens_take_nothing_where_nothing_is_learned_of_them(changes: dict[str, Any]) -> None:
    plain = latent_model(layers=4)
    further = replace(plain, mtp_layers=plain.layers[-1:])
    job = spec(**changes)
    assert trained_shape(further, job) == plain
    assert needs(job, further) == needs(job, plain)
    assert checkpoint_bytes(further, job) == checkpoint_bytes(plain, job)
    assert export_bytes(further, job) == export_bytes(plain, job)
    assert checkpoint_bytes(further, spec()) - checkpoint_bytes(plain, spec()) == 14 * mtp_parameters(further)


def test_an_embedding_is_held_at_both_ends_where_further_tokens_are_predicted() -> None:
    plain = latent_model(layers=4)
    further = replace(plain, mtp_layers=plain.layers[-1:])
    for pipeline, copies in ((1, 0), (2, 1)):
        job = spec(parallelism={"pipeline": pipeline})
        last = [prepare_case(job, shape, derive_layout(job.parallelism, 8)) for shape in (plain, further)]
        before, after = (stage_parameters(case, case.stages[-1]).held.total for case in last)
        assert after - before == mtp_parameters(further) + copies * 129_280 * 7168


def test_a_checkpoint_holds_weights_and_optimizer_state() -> None:
    shape = moe_model(layers=2)
    whole = total_parameters(shape) + mtp_parameters(shape)
    assert checkpoint_bytes(shape, spec()) == whole * (2 + 12)
    assert export_bytes(shape, spec()) == whole * 2


def test_the_volume_holds_one_checkpoint_more_than_is_kept_beside_export_and_download() -> None:
    shape = moe_model(layers=2)
    job = spec(model={"source": "Qwen/Qwen3-30B-A3B"}, checkpoint={"keep": 3})
    one = total_parameters(shape) * (2 + 12)
    assert volume_need(shape, job) == VolumeNeed(
        one, 4, export=2 * total_parameters(shape), download=2 * total_parameters(shape)
    )
    assert volume_need(shape, job).bytes == 4 * one + 4 * total_parameters(shape)
    without = spec(model={"source": "/models/a"}, checkpoint={"exportHuggingFace": False})
    assert volume_need(shape, without).bytes == 3 * one
    of_megatron = {"source": "/checkpoints/a", "config": "Qwen/Qwen3-30B-A3B"}
    both_ways = volume_need(shape, spec(model=of_megatron, checkpoint={"exportMegatron": True}))
    assert (both_ways.download, both_ways.export) == (2 * total_parameters(shape), 4 * total_parameters(shape))


@pytest.mark.parametrize(
    ("sections", "steps", "groups", "answers"),
    [
        pytest.param({}, 101, 8, 32, id="the last hundred steps"),
        pytest.param({"training": {"maxSteps": 3}}, 4, 8, 32, id="a short run"),
        pytest.param({"grpo": {"dynamicSampling": {"overSampling": 2.1}}}, 101, 17, 68, id="groups that are replaced"),
    ],
)
def test_recorded_tokens_take_room_on_the_volume(
    sections: dict[str, Any], steps: int, groups: int, answers: int
) -> None:
    grpo = {"groupSize": 4, "promptsPerStep": 8, "maxNewTokens": 100}
    base = merge_sections({"training": {"globalBatchSize": None}, "data": {"maxLength": 300}, "grpo": grpo}, sections)
    shape = moe_model(layers=2)
    without, recorded = (
        volume_need(shape, spec(method="GRPO", **merge_sections(base, {"grpo": {"recordTokens": is_recorded}})))
        for is_recorded in (False, True)
    )
    assert without.tokens == 0
    # Prompts of 200 tokens, once for each group; answers of 100, each token in six numbers of four bytes.
    assert recorded.tokens == steps * (2**16 + groups * (48 + 4 * 200) + answers * (48 + 8 + 4 + 24 * 100))
    assert recorded.bytes - without.bytes == recorded.tokens


@pytest.mark.parametrize(("source", "weights"), [("Qwen/Qwen3-30B-A3B", 2), ("pvc://models/a", 0), ("/models/a", 0)])
def test_a_model_of_the_hub_takes_room_on_the_volume(source: str, weights: int) -> None:
    shape = moe_model(layers=2)
    assert download_bytes(shape, spec(model={"source": source})) == total_parameters(shape) * weights


def test_a_checkpoint_of_adapters_holds_weights_that_another_job_may_have_trained() -> None:
    shape = moe_model(layers=2)
    lora: dict[str, Any] = {"lora": {}}
    apart = checkpoint_bytes(shape, spec(training=lora))
    beside = checkpoint_bytes(shape, spec(training=lora, checkpoint={"resumeFrom": "another"}))
    assert beside - apart == export_bytes(shape, spec())
    assert 0 < apart < beside / 10


@pytest.mark.parametrize(
    ("experts", "more", "size", "copies"),
    [
        pytest.param(255, {}, 1, 2, id="a byte names an expert"),
        pytest.param(256, {}, 2, 2, id="two bytes name an expert"),
        pytest.param(4, {"dynamicSampling": {"overSampling": 8.5}}, 1, 10, id="more is asked until a step is full"),
        pytest.param(4, {"rollout": {"staleness": 3}}, 1, 5, id="groups of three further steps are finished"),
    ],
)
@pytest.mark.parametrize("accelerator", ["GPU", "CPU"])
def test_replayed_routing_takes_host_memory_in_every_rank(
    accelerator: str, experts: int, more: dict[str, Any], size: int, copies: int
) -> None:
    first, second = TINY_MIXTURE.layers
    mixed = (replace(first, mlp=DenseMLP(16)), replace(second, mlp=Experts(experts, 2, 16)))
    shape = replace(TINY_MIXTURE, layers=mixed)

    def need(replay: bool) -> MemoryEstimate:
        grpo = {"groupSize": 4, "promptsPerStep": 8, "maxNewTokens": 100, "routingReplay": replay}
        sections = {"data": {"maxLength": 128}, "resources": {"accelerator": accelerator}, "grpo": grpo | more}
        return needs(spec(method="GRPO", parallelism={"data": 4}, **sections), shape)

    # 32 answers; 2 experts of each token in the one layer that has some. Each of three ranks beside the first
    # learns from a quarter of them, which it has once more.
    by_hand = 4 * 8 * 128 * 1 * 2 * size * copies + 3 * 4 * 8 * 128 * 1 * 2 * size * 5 // 4
    without, replayed = need(False), need(True)
    assert (without.replay_bytes_per_pod, replayed.replay_bytes_per_pod) == (0, by_hand)
    assert replayed.host_bytes_per_pod - without.host_bytes_per_pod == by_hand
    assert replayed.bytes == without.bytes


def test_a_checkpoint_keeps_the_groups_that_engines_have_finished_for_later_steps() -> None:
    def checkpoint(staleness: int, *, replay: bool) -> int:
        rollout = {"staleness": staleness}
        grpo = {"groupSize": 4, "promptsPerStep": 8, "maxNewTokens": 100, "routingReplay": replay, "rollout": rollout}
        return volume_need(TINY_MIXTURE, spec(method="GRPO", data={"maxLength": 128}, grpo=grpo)).checkpoint

    # A token has an id, a log-probability and a version, and in each of two layers two experts of a byte.
    tokens = 4 * 8 * 128
    assert checkpoint(3, replay=False) - checkpoint(0, replay=False) == 3 * tokens * 12
    assert checkpoint(3, replay=True) - checkpoint(0, replay=True) == 3 * tokens * (12 + 2 * 2)


@pytest.mark.parametrize(
    ("sections", "of_a_parameter"),
    [
        # Two moments and float32 weights, then buffers: gradients in float32, weights in the model's type, moments in
        # float32 where they are kept in less.
        pytest.param({}, (8 + 4) + (4 + 2), id="as it is"),
        pytest.param({"training": {"precision": {"moments": "bfloat16"}}}, (4 + 4) + (4 + 2 + 8), id="lower moments"),
        pytest.param(
            {"training": {"communication": {"overlapOptimizerCopies": True}}}, (8 + 4) + 2 * (4 + 2), id="one ahead"
        ),
        pytest.param({"memory": {"sharding": "FSDP"}}, (8 + 4) + (4 + 4), id="shares in float32"),
    ],
)
def test_an_optimizer_in_host_memory_takes_its_state_and_buffers_there(
    sections: dict[str, Any], of_a_parameter: int
) -> None:
    def host(offloaded: float) -> int:
        memory = {"offloadOptimizer": offloaded} | sections.get("memory", {})
        return needs(spec(parallelism={"data": 1}, **(sections | {"memory": memory})), TINY_MIXTURE).host_bytes_per_pod

    trained = total_parameters(TINY_MIXTURE)
    assert host(1.0) - host(0.0) == pytest.approx(trained * of_a_parameter, rel=0.02)


# SmolLM2-135M.
SMOL = ModelShape(
    Family.LLAMA, 576, 49_152, True, 8192, (Layer(GroupedAttention(9, 3, head_dim=64), DenseMLP(1536)),) * 30
)
# Of a whole run of it in bfloat16 with rows of 256 tokens: the sum of all processes' own memory at its peak.
MEASURED_SMOL_BYTES = 4856 * 2**20


def test_a_rank_on_cpus_has_the_copy_of_a_checkpoint_beside_its_state() -> None:
    def host(**checkpoint: Any) -> int:
        job = spec(
            parallelism={"data": 1}, resources={"accelerator": "CPU"}, data={"maxLength": 256}, checkpoint=checkpoint
        )
        return needs(job, SMOL).host_bytes_per_pod

    # Two moments and weights in float32, and the weights in their type.
    assert host() - host(**{"async": False}) == pytest.approx((12 + 2) * total_parameters(SMOL), rel=0.02)
    assert MEASURED_SMOL_BYTES < host() < 1.15 * MEASURED_SMOL_BYTES
    assert host(**{"async": False}) < MEASURED_SMOL_BYTES


def test_the_conversion_of_a_checkpoint_of_megatron_takes_host_memory_of_its_own() -> None:
    def host(**sections: Any) -> int:
        return needs(spec(parallelism={"data": 1}, **sections), TINY_MIXTURE).host_bytes_per_pod

    (experts,) = (mlp for mlp in TINY_MIXTURE.mlp_kinds() if isinstance(mlp, Experts))
    largest = TINY_MIXTURE.hidden * max(TINY_MIXTURE.vocabulary, experts.count * 2 * experts.intermediate)
    of_process = 2**30 + 3 * 2 * largest
    assert host(checkpoint={"exportMegatron": True}) - host() == of_process
    of_megatron = {"source": "/checkpoints/a", "config": "/models/a"}
    assert host(model=of_megatron) - host(model={"source": "/models/a"}) == of_process


def test_an_engine_without_room_for_a_sequence_does_not_fit() -> None:
    job = spec(
        method="GRPO",
        parallelism={"expert": 8},
        resources={"gpuType": "H100"},
        memory={"offloadOptimizer": 1.0, "offloadParameters": True, "offloadGradients": True},
        grpo={"rewards": [{"name": "math"}], "rollout": {"gpuMemoryUtilization": 0.3}},
    )
    answer = needs(job, moe_model())
    assert answer.engine is not None
    assert not answer.engine.can_run
    assert not answer.is_within(1024 * GIB)
