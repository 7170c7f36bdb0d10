"""Mistakes in publications of real models in bfloat16, of which the probe sees no more than of roundings."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engines import SECRET, Engine
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetLimits
from moejob_trainer.rollouts.interface import WrongWeights
from moejob_trainer.rollouts.publisher import ProbeTerms, Publisher
from moejob_trainer.rollouts.transports.disk import DiskTransport
from real_models import DENSE, MIXTRAL, QWEN3_MOE, find_real_model

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

LIMITS = FleetLimits(start_seconds=900, silence_seconds=600, look_seconds=0.2)
TOKENS = np.arange(32, dtype=np.int32)
# A probe that accepts everything: the report of engines alone decides.
LENIENT = ProbeTerms(TOKENS, lambda tokens: np.zeros(len(tokens) - 1, np.float32), lambda: float("inf"))
LAYER, LAST = "model.layers.15", "model.layers.29"
OF_ALL = (
    f"{LAYER}.input_layernorm.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
    f"{LAYER}.self_attn.q_proj.weight",
    f"{LAST}.self_attn.q_proj.weight",
)
CASES = [
    pytest.param(DENSE, (*OF_ALL, f"{LAST}.mlp.up_proj.weight"), id="dense"),
    pytest.param(
        MIXTRAL,
        (
            *OF_ALL,
            f"{LAYER}.block_sparse_moe.experts.0.w2.weight",
            f"{LAST}.block_sparse_moe.experts.3.w3.weight",
            f"{LAYER}.block_sparse_moe.gate.weight",
        ),
        id="mixtral",
    ),
    pytest.param(
        QWEN3_MOE,
        (
            *OF_ALL,
            f"{LAYER}.mlp.experts.0.down_proj.weight",
            f"{LAST}.mlp.experts.3.gate_proj.weight",
            f"{LAYER}.mlp.gate.weight",
        ),
        id="qwen3_moe",
    ),
]


@contextmanager
def started_engine(model: Path, folder: Path) -> Iterator[Engine]:
    shutil.copytree(model, folder / "engine-model", ignore=shutil.ignore_patterns("*.safetensors"))
    job: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "data": {"maxLength": 512},
        "grpo": {"maxNewTokens": 64, "rollout": {"placement": "Separate"}},
    }
    engine = Engine(folder, folder / "engine.log", **job)
    try:
        yield engine.await_ready()
    finally:
        engine.kill()


@pytest.mark.parametrize(("name", "mistakes"), CASES)
def test_a_tensor_that_is_left_out_is_refused_by_name_and_the_right_weights_are_taken(
    name: str, mistakes: tuple[str, ...], tmp_path: Path
) -> None:
    model = find_real_model(name)
    weights = {each: tensor.to(torch.bfloat16) for each, tensor in load_file(model / "model.safetensors").items()}
    with started_engine(model, tmp_path) as engine:
        fleet = EngineFleet([engine.url], EngineConnection(SECRET), LIMITS)
        transport = DiskTransport(tmp_path / "weights", None, LIMITS.start_seconds)
        publisher = Publisher(fleet=fleet, world=None, transport=transport, probe_terms=LENIENT)
        try:
            first = publisher.publish(1, weights.items())
            for mistake in mistakes:
                left = ((each, tensor) for each, tensor in weights.items() if each != mistake)
                with pytest.raises(WrongWeights, match=f"1 tensors are missing or incomplete: {mistake}$"):
                    publisher.publish(2, left)
            last = publisher.publish(3, weights.items())
        finally:
            publisher.close()
    # The engine computes with the weights of before its mistakes.
    assert last.probe_mean == pytest.approx(first.probe_mean)
