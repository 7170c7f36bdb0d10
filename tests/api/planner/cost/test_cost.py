"""The cost of a step: against measured throughput, by hand where a hand can, and never the wrong way round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import dense_model, latent_model, moe_model, spec
from moejob_api.hardware import H100, H200, Hardware
from moejob_api.job import Spec
from moejob_api.layout.sizes import derive_layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.cost import StepCost, TimeUse, step_cost
from moejob_api.planner.cost.generation import engine_speed
from moejob_api.planner.cost.rates import IN_NODE_LATENCY_SECONDS, NETWORK_LATENCY_SECONDS


def cost(job: Spec, shape: ModelShape, hardware: Hardware = H200) -> StepCost:
    return step_cost(job, shape, derive_layout(job.parallelism, job.resources.gpus_per_node), hardware)


def seconds(answer: StepCost, spent: TimeUse) -> float:
    return sum(part.seconds for part in answer.parts if part.name is spent)


def training(micro: int, batches: int, expert: int = 1, gradients: str = "bfloat16", **parallelism: int) -> Spec:
    return spec(
        parallelism={"expert": expert, **parallelism},
        training={
            "microBatchSize": micro,
            "globalBatchSize": micro * batches * expert,
            "precision": {"gradients": gradients},
        },
    )


def in_float8(micro: int, batches: int) -> Spec:
    precision = {"gradients": "bfloat16", "compute": "FP8"}
    return spec(training={"microBatchSize": micro, "globalBatchSize": micro * batches, "precision": precision})


@pytest.mark.parametrize(
    ("tensor", "at_once", "measured"), [(1, 8, 622), (1, 64, 2571), (1, 256, 8533), (2, 8, 900), (2, 64, 4162)]
)
def test_generation_measured_on_h100_is_met_within_ten_percent(tensor: int, at_once: int, measured: int) -> None:
    rollout = {"placement": "Separate", "tensor": tensor, "replicas": 1, "gpuMemoryUtilization": 0.92}
    job = spec(
        method="GRPO", resources={"gpuType": "H100"}, data={"maxLength": 512}, grpo={"groupSize": 8, "rollout": rollout}
    )
    assert job.grpo is not None
    engine = engine_speed(job, job.grpo, moe_model(), 1, H100)
    assert at_once / engine.round_seconds(at_once) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("job", "layers", "measured"),
    [
        pytest.param(training(2, 4), 8, 72_482, id="8 layers, 2 x 4"),
        pytest.param(training(4, 4), 8, 84_117, id="8 layers, 4 x 4"),
        pytest.param(in_float8(4, 4), 8, 92_801, id="8 layers, 4 x 4, FP8"),
        pytest.param(training(4, 4, gradients="float32"), 6, 95_292, id="6 layers, 4 x 4, float32 gradients"),
        pytest.param(training(4, 4), 3, 151_966, id="3 layers, 4 x 4"),
        pytest.param(training(1, 8), 8, 68_267, id="8 layers, 1 x 8"),
        pytest.param(training(4, 2, expert=2), 8, 75_134, id="2 GPUs, 8 layers, 4 x 2"),
        pytest.param(training(4, 2, expert=4), 24, 30_450, id="4 GPUs, 24 layers, 4 x 2"),
        pytest.param(training(4, 2, expert=2, tensor=2), 12, 42_096, id="4 GPUs, 12 layers, 4 x 2, tensor 2"),
        pytest.param(training(2, 8, expert=2, pipeline=2), 16, 32_734, id="4 GPUs, 16 layers, 2 x 8, pipeline 2"),
    ],
)
def test_throughput_measured_on_h200_is_met_within_ten_percent(job: Spec, layers: int, measured: int) -> None:
    assert cost(job, moe_model(layers=layers)).tokens_per_second_per_gpu == pytest.approx(measured, rel=0.10)


def test_an_optimizer_in_host_memory_takes_what_was_measured_within_a_tenth() -> None:
    batch = {"microBatchSize": 4, "globalBatchSize": 16, "precision": {"gradients": "bfloat16"}}
    job = spec(training=batch, memory={"offloadOptimizer": 1.0})
    assert cost(job, moe_model(layers=3)).seconds == pytest.approx(1.443, rel=0.1)


def test_activations_in_host_memory_take_what_was_measured_within_a_tenth() -> None:
    batch = {"microBatchSize": 1, "globalBatchSize": 4, "precision": {"gradients": "bfloat16"}}
    job = spec(training=batch, data={"maxLength": 32768}, memory={"offloadActivations": True})
    assert cost(job, moe_model(layers=8)).seconds == pytest.approx(5.409, rel=0.1)


# Two GPUs in one run, 8 layers, 4 x 4, bfloat16 gradients.
@pytest.mark.parametrize(
    ("hardware", "sharding", "reads", "measured"),
    [
        # The mean of the whole weights' runs before and behind it.
        pytest.param(H200, "FSDP", None, 78_743 / 82_234, id="FSDP on H200"),
        pytest.param(H200, "ZeRO2", None, 80_493 / 82_393, id="ZeRO2 on H200"),
    ],
)
def test_what_shares_cost_beside_whole_weights_is_met_within_five_percent(
    hardware: Hardware, sharding: str, reads: bool | None, measured: float
) -> None:
    def seconds_as(sharding: str) -> float:
        batch = {"microBatchSize": 4, "globalBatchSize": 32, "precision": {"gradients": "bfloat16"}}
        batch |= {} if reads is None else {"communication": {"readReplicas": reads}}
        job = spec(parallelism={"data": 2}, training=batch, memory={"sharding": sharding})
        return cost(job, moe_model(layers=8), hardware).seconds

    assert seconds_as("DistributedOptimizer") / seconds_as(sharding) == pytest.approx(measured, rel=0.05)


def test_throughput_published_for_eight_h100_is_met_within_a_third() -> None:
    job = spec(
        parallelism={"expert": 8},
        training={"microBatchSize": 2, "globalBatchSize": 128, "recompute": {"granularity": "Selective"}},
    )
    assert cost(job, moe_model(), H100).tokens_per_second_per_gpu == pytest.approx(12_040, rel=0.34)


@pytest.mark.parametrize(
    ("pipeline", "chunks", "batch", "expected"),
    [
        pytest.param(4, None, 16, 3 / 16, id="three waits beside sixteen microbatches"),
        pytest.param(4, 2, 16, 1.5 / 16, id="half as long in two chunks"),
        pytest.param(1, None, 16, 0.0, id="one stage never waits"),
    ],
)
def test_the_bubble_by_hand(pipeline: int, chunks: int | None, batch: int, expected: float) -> None:
    sizes = {"pipeline": pipeline, "virtualPipeline": chunks}
    answer = cost(spec(parallelism=sizes, training={"globalBatchSize": batch}), dense_model())
    stage = sum(p.seconds for p in answer.parts if p.name not in {TimeUse.BUBBLE, TimeUse.DATA, TimeUse.OPTIMIZER})
    assert seconds(answer, TimeUse.BUBBLE) == pytest.approx(expected * stage)


def test_one_gpu_talks_to_nobody() -> None:
    answer = cost(training(1, 4), moe_model(layers=4))
    talking = {
        TimeUse.TENSOR,
        TimeUse.DISPATCH,
        TimeUse.CONTEXT,
        TimeUse.PIPELINE,
        TimeUse.DATA,
        TimeUse.BUBBLE,
        TimeUse.OFFLOAD,
    }
    assert not talking & {part.name for part in answer.parts}


def test_fp8_makes_products_of_layers_faster_and_pays_for_rounding() -> None:
    plain, rounded = training(4, 4), in_float8(4, 4)
    one, other = cost(plain, moe_model(layers=4)), cost(rounded, moe_model(layers=4))
    # Two of three products at 1.75 times the speed.
    for spent in (TimeUse.EXPERTS, TimeUse.PROJECTIONS):
        assert seconds(other, spent) / seconds(one, spent) == pytest.approx((1 + 2 / 1.75) / 3)
    assert seconds(other, TimeUse.OUTPUT) == seconds(one, TimeUse.OUTPUT)
    assert seconds(one, TimeUse.ROUNDING) == 0
    assert 0 < seconds(other, TimeUse.ROUNDING) < seconds(one, TimeUse.EXPERTS) - seconds(other, TimeUse.EXPERTS)


@pytest.mark.parametrize(
    ("change", "spent"),
    [
        pytest.param({"tensor": 2}, TimeUse.TENSOR, id="tensor"),
        pytest.param({"expert": 2}, TimeUse.DISPATCH, id="expert"),
        pytest.param({"context": 2}, TimeUse.CONTEXT, id="context"),
        pytest.param({"pipeline": 2}, TimeUse.PIPELINE, id="pipeline"),
        pytest.param({"data": 2}, TimeUse.DATA, id="data"),
    ],
)
def test_every_group_has_its_price(change: dict[str, Any], spent: TimeUse) -> None:
    assert seconds(cost(spec(parallelism=change), moe_model(layers=4)), spent) > 0


# Choices of moe_model; H200.
@pytest.mark.parametrize(
    ("dispatcher", "over_network", "inside"),
    [
        pytest.param("AllToAll", 16 * (1 - (15 / 16) ** 8) / 2, 0.0, id="to ranks, inside and outside at once"),
        pytest.param("Flex", 2 * (1 - (1 / 2) ** 8) / 2, 16 * (1 - (15 / 16) ** 8) * 7 / 8, id="to nodes, then inside"),
    ],
)
def test_tokens_to_experts_over_two_nodes_by_hand(dispatcher: str, over_network: float, inside: float) -> None:
    shape = moe_model(layers=1)
    assert shape.experts is not None
    assert shape.experts.per_token == 8
    answer = cost(spec(parallelism={"expert": 16}, moe={"dispatcher": dispatcher}), shape)
    # Out and back, in both passes, with rows between those of even routing and those that memory is kept for.
    row = 1.125 * 4096 * shape.hidden * 2
    network = over_network * row / (0.80 * H200.network_bytes_per_second) + NETWORK_LATENCY_SECONDS
    nvlink = inside * row / (0.48 * H200.nvlink_bytes_per_second) + IN_NODE_LATENCY_SECONDS if inside else 0.0
    microbatches = 64 // 16
    assert seconds(answer, TimeUse.DISPATCH) == pytest.approx(4 * microbatches * (network + nvlink))
    why = next(part.why for part in answer.parts if part.name is TimeUse.DISPATCH)
    assert why.endswith(f"{over_network:.1f} rows of a token over the network")


@pytest.mark.parametrize(("capacity", "rows"), [(0.5, 0.5), (1.0, 1.0), (1.5, 1.25)])
def test_a_usual_layer_has_no_rows_beyond_its_capacity(capacity: float, rows: float) -> None:
    def dispatched(factor: float) -> float:
        job = spec(parallelism={"expert": 8}, moe={"capacityFactor": factor})
        waits = 4 * (64 // 8) * IN_NODE_LATENCY_SECONDS
        return seconds(cost(job, moe_model(layers=1)), TimeUse.DISPATCH) - waits

    assert dispatched(capacity) / dispatched(1.0) == pytest.approx(rows)


def test_a_micro_batch_takes_what_its_host_takes_where_the_gpu_is_faster() -> None:
    # Of 4,096 tokens over four ranks: seven meetings for experts, as many for their parts, five for attention.
    job = spec(parallelism={"tensor": 4, "expert": 2}, training={"microBatchSize": 1, "globalBatchSize": 64})
    answer = cost(job, moe_model(layers=8))
    of_gpus = (TimeUse.BUBBLE, TimeUse.DATA, TimeUse.OPTIMIZER)
    passes = sum(part.seconds for part in answer.parts if part.name not in of_gpus)
    assert seconds(answer, TimeUse.HOST) > 0
    assert passes == pytest.approx(32 * 8 * (7.5e-3 + 19 * 0.35e-3))
    assert not seconds(cost(spec(training={"microBatchSize": 4}), moe_model(layers=8)), TimeUse.HOST)


def test_ranks_that_share_an_expert_gather_each_token_once() -> None:
    shape = moe_model(layers=1)
    sizes = {"tensor": 2, "expertTensor": 2, "expertLayout": "Folded"}
    answer = cost(spec(parallelism=sizes, training={"microBatchSize": 1, "globalBatchSize": 8}), shape)
    # Half of the tokens are this rank's, the others come: in one row each, whatever experts they chose.
    others = 4096 / 2 * shape.hidden * 2 / (0.75 * H200.nvlink_bytes_per_second)
    assert seconds(answer, TimeUse.DISPATCH) == pytest.approx(4 * 8 * (others + IN_NODE_LATENCY_SECONDS))


def test_full_recomputation_costs_a_forward_pass() -> None:
    plain = cost(spec(), dense_model(layers=8))
    again = cost(spec(training={"recompute": {"granularity": "Full"}}), dense_model(layers=8))
    layers = sum(
        seconds(plain, spent)
        for spent in (TimeUse.PROJECTIONS, TimeUse.ATTENTION, TimeUse.FEED_FORWARD, TimeUse.ELEMENTWISE)
    )
    assert again.seconds - plain.seconds == pytest.approx(layers / 3)


@pytest.mark.parametrize(
    ("moe", "passes"),
    [
        pytest.param({"balancing": "GlobalAuxLoss"}, 1, id="counted first"),
        pytest.param({"balancing": "GlobalAuxLoss", "auxLossCoefficient": 0.0}, 0, id="without weight"),
        pytest.param({"balancing": "AuxLoss"}, 0, id="by document"),
    ],
)
def test_balancing_over_the_global_batch_costs_a_forward_pass(moe: dict[str, Any], passes: int) -> None:
    plain = cost(spec(), moe_model(layers=4))
    counted = cost(spec(moe=moe), moe_model(layers=4))
    # On one GPU the backward pass is two forward passes.
    beside = (TimeUse.ACCUMULATION, TimeUse.DATA, TimeUse.OPTIMIZER)
    once = sum(part.seconds for part in plain.parts if part.name not in beside) / 3
    assert counted.seconds - plain.seconds == pytest.approx(passes * once)


JOBS = st.builds(
    lambda tensor, pipeline, expert, data, context: spec(
        parallelism={"tensor": tensor, "pipeline": pipeline, "expert": expert, "data": data, "context": context},
        training={"globalBatchSize": 256},
    ),
    *(st.sampled_from((1, 2, 4)) for _ in range(5)),
)


@settings(max_examples=60, deadline=None)
@given(JOBS, st.sampled_from(("nvlink_bytes_per_second", "network_bytes_per_second", "bf16_flops_per_second")))
def test_faster_hardware_is_never_slower(job: Spec, rate: str) -> None:
    faster = replace(H100, **{rate: 2 * getattr(H100, rate)})
    shape = moe_model(layers=16)
    # Where the host decides nothing is faster, but sums are rounded.
    assert cost(job, shape, faster).seconds <= cost(job, shape, H100).seconds * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(JOBS)
def test_parts_add_up_and_say_why(job: Spec) -> None:
    answer = cost(job, latent_model(layers=16))
    assert answer.seconds == pytest.approx(sum(part.seconds for part in answer.parts))
    assert all(part.seconds > 0 and part.why for part in answer.parts)
    assert 0 < answer.mfu < 1
