"""The estimate against one H200: Megatron training steps on plain torch, one line for each run in h200.jsonl.

The bytes are torch's own counters. What they do not count (context, communicators, the allocator's waste) is left out
of the comparison, except in the last test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builders import spec
from moejob_api import derived
from moejob_api.job import Spec
from moejob_api.layout.sizes import layout
from moejob_api.models.shape import DenseMLP, Experts, Family, GroupedAttention, LatentAttention, Layer, ModelShape
from moejob_api.planner.memory import MemoryEstimate, estimate
from moejob_api.planner.memory.case import prepared
from moejob_api.planner.memory.kept_activations import kept
from moejob_api.planner.memory.phases import OUTSIDE_TENSORS, MemoryPhase

RUNS = [json.loads(line) for line in Path(__file__).with_name("h200.jsonl").read_text().splitlines()]
MODULES = {
    "moe_act": "ExpertActivation",
    "layernorm": "Norms",
    "core_attn": "CoreAttention",
    "moe": "Experts",
    "mlp": "MLP",
    "mla_up_proj": "LatentUpProjection",
    "shared_experts": "SharedExperts",
}


@pytest.fixture(autouse=True)
def slopes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most runs were measured when the loss computed its logits again."""
    if not request.getfixturevalue("run").get("slopes"):
        monkeypatch.setattr(derived, "MOST_SLOPE_BYTES", 0)


every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run["case"])


@every_run
def test_the_peak_of_forward_and_backward_is_within_seven_percent(run: dict[str, Any]) -> None:
    assert tensors(run, MemoryPhase.TRAIN) == pytest.approx(run["stepPeakBytes"], rel=0.07)


@every_run
def test_the_peak_of_the_optimizer_step_is_within_seven_percent(run: dict[str, Any]) -> None:
    assert tensors(run, MemoryPhase.STEP) == pytest.approx(run["optimizerPeakBytes"], rel=0.07)


@pytest.mark.parametrize(
    "run",
    [run for run in RUNS if run.get("recompute") != "full" and "moe" not in run.get("modules", ())],
    ids=lambda r: r["case"],
)
def test_what_a_layer_keeps_is_within_one_percent(run: dict[str, Any]) -> None:
    shape, job = model(run), training(run)
    case = prepared(job, shape, layout(job.parallelism, 8))
    assert kept(shape.layers[0], case.share, case.keeping).total == pytest.approx(run["layerBytes"], rel=0.01)


@every_run
def test_the_whole_device_is_within_fifteen_percent(run: dict[str, Any]) -> None:
    """The allocator keeps what it has while there is room, so a device looks fuller than it has to be."""
    assert answer(run).bytes == pytest.approx(run["deviceBytes"], rel=0.15)


def tensors(run: dict[str, Any], phase: MemoryPhase) -> int:
    peak = next(peak for peak in answer(run).phases if peak.phase is phase)
    return sum(part.bytes for part in peak.parts if part.name not in OUTSIDE_TENSORS)


def answer(run: dict[str, Any]) -> MemoryEstimate:
    job = training(run)
    return estimate(job, model(run), layout(job.parallelism, 8))


def training(run: dict[str, Any]) -> Spec:
    recompute: dict[str, Any] = {}
    if run.get("recompute") == "selective":
        recompute = {"granularity": "Selective", "modules": [MODULES[module] for module in run["modules"]]}
    if run.get("recompute") == "full":
        method = run.get("method", "uniform").capitalize()
        recompute = {"granularity": "Full", "layers": run["recomputeLayers"], "method": method}
    return spec(
        data={"maxLength": run["sequence"]},
        training={
            "globalBatchSize": run["micro"],
            "microBatchSize": run["micro"],
            "recompute": recompute,
            "precision": {"gradients": "bfloat16" if run["bf16Gradients"] else "float32"},
        },
    )


def model(run: dict[str, Any]) -> ModelShape:
    sizes = run["model"]
    layer = Layer(attention(sizes, has_head_norm=run["case"].startswith("qwen")), feed_forward(sizes))
    return ModelShape(Family.LLAMA, sizes["H"], sizes["V"], False, 131_072, (layer,) * run["layers"])


def attention(sizes: dict[str, Any], *, has_head_norm: bool) -> GroupedAttention | LatentAttention:
    if "mla" not in sizes:
        return GroupedAttention(sizes["NH"], sizes["NKV"], sizes["HD"], head_norm=has_head_norm)
    latent = sizes["mla"]
    return LatentAttention(sizes["NH"], latent["q"], latent["kv"], latent["nope"], latent["rope"], latent["v"])


def feed_forward(sizes: dict[str, Any]) -> DenseMLP | Experts:
    if "E" not in sizes:
        return DenseMLP(sizes["FF"])
    return Experts(sizes["E"], sizes["K"], sizes["FF"], shared_intermediate=sizes.get("shared", 0))
