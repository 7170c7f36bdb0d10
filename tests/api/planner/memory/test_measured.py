"""The estimate against one H200: steps of the trainer, which benchmarks/trainer/memory.py measures into h200.jsonl.

The bytes are torch's own counters. What they do not count (context, communicators, the allocator's waste) is left out
of the comparison, except in the last test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builders import spec
from moejob_api.job import Spec
from moejob_api.job.training import RecomputeGranularity
from moejob_api.layout.sizes import derive_layout
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory import MemoryEstimate, estimate_memory
from moejob_api.planner.memory.case import prepare_case
from moejob_api.planner.memory.kept_activations import kept_by_layer
from moejob_api.planner.memory.phases import MemoryPhase, MemoryUse

RUNS = [json.loads(line) for line in Path(__file__).with_name("h200.jsonl").read_text().splitlines()]
# What torch.cuda.max_memory_allocated() does not count.
OUTSIDE_TENSORS = frozenset(
    {MemoryUse.CONTEXT, MemoryUse.COMMUNICATORS, MemoryUse.FRAGMENTATION, MemoryUse.ENGINE_ASLEEP}
)
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run["case"])


@every_run
def test_the_peak_of_forward_and_backward_is_within_six_percent(run: dict[str, Any]) -> None:
    assert tensors(run, MemoryPhase.TRAIN) == pytest.approx(run["stepPeakBytes"], rel=0.06)


@every_run
def test_the_peak_of_the_optimizer_step_is_within_half_a_percent(run: dict[str, Any]) -> None:
    assert tensors(run, MemoryPhase.STEP) == pytest.approx(run["optimizerPeakBytes"], rel=0.005)


@pytest.mark.parametrize(
    "run",
    [
        run
        for run in RUNS
        if run["recompute"].get("granularity") != RecomputeGranularity.FULL
        and "Experts" not in run["recompute"].get("modules", ())
    ],
    ids=lambda run: run["case"],
)
def test_what_a_layer_keeps_is_within_one_percent(run: dict[str, Any]) -> None:
    shape, job = read_model_shape(run), training(run)
    case = prepare_case(job, shape, derive_layout(job.parallelism, 8))
    assert kept_by_layer(shape.layers[0], case.share, case.activation_settings).total == pytest.approx(
        run["layerBytes"], rel=0.01
    )


@pytest.mark.parametrize("run", [run for run in RUNS if "deviceBytes" in run], ids=lambda run: run["case"])
def test_the_whole_device_is_within_fifteen_percent(run: dict[str, Any]) -> None:
    """The allocator keeps what it has while there is room, so a device looks fuller than it has to be."""
    assert answer(run).bytes == pytest.approx(run["deviceBytes"], rel=0.15)


def tensors(run: dict[str, Any], phase: MemoryPhase) -> int:
    peak = next(peak for peak in answer(run).phases if peak.phase is phase)
    return sum(part.bytes for part in peak.parts if part.name not in OUTSIDE_TENSORS)


def answer(run: dict[str, Any]) -> MemoryEstimate:
    job = training(run)
    return estimate_memory(job, read_model_shape(run), derive_layout(job.parallelism, 8))


def training(run: dict[str, Any]) -> Spec:
    return spec(
        data={"maxLength": run["sequence"]},
        training={
            "globalBatchSize": run["micro"],
            "microBatchSize": run["micro"],
            "recompute": run["recompute"],
            "precision": run["precision"],
        },
        moe={"balancing": "None"},
        resources={"gpuType": "H200"},
    )


def read_model_shape(run: dict[str, Any]) -> ModelShape:
    return shape_of({**(catalog.find_config(run["model"]) or {}), **run["config"]})
