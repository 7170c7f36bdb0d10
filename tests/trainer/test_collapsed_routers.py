"""A real run with a router that is made to collapse reports the layer, and reports it no more when it has recovered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moejob_api.router_health import COLLAPSE_STEPS, reported_layers
from moejob_trainer.data import tiny
from trainer.runs import Runs, StartedRanks

EXPERTS, COLLAPSED_LAYER = 8, 2
CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
}
TRAINING: dict[str, Any] = {"maxSteps": 30, "globalBatchSize": 8}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path / "volume")
    yield started
    started.close()


def write_biased_model(folder: Path) -> None:
    """A model of random weights in which the router of one layer prefers two experts, whatever the token."""
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("deepseek_v3", **CONFIG), dtype=torch.float32
    )
    for number, layer in enumerate(model.model.layers[1:], 1):
        bias = layer.mlp.gate.e_score_correction_bias
        bias.zero_()
        # Tokens differ by more than a step of the bias.
        layer.mlp.gate.weight.data.mul_(20.0)
        if number == COLLAPSED_LAYER:
            # Scores are sigmoids: no token makes up for four.
            bias[:2] = 4.0
    model.save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)


def watch_layers(started: StartedRanks) -> list[tuple[int, ...] | None]:
    """Return the reports of collapsed layers, each once, until the run has ended."""
    reports: list[tuple[int, ...] | None] = []
    is_running = True
    while is_running:
        is_running = started.is_running()
        run = started.board.read_run()
        layers = None if run is None else reported_layers(run.measures)
        if run is not None and reports[-1:] != [layers]:
            reports.append(layers)
        time.sleep(0.005)
    assert started.await_exit_codes() == [0] * len(started.processes), started.read_log()
    return reports


def test_a_collapsed_router_stays_reported_without_balancing(runs: Runs) -> None:
    write_biased_model(runs.volume / "biased")
    started = runs.start(
        model={"source": str(runs.volume / "biased")}, moe={"balancing": "None"}, training={**TRAINING, "maxSteps": 12}
    )
    assert watch_layers(started)[-1] == (COLLAPSED_LAYER,)
    assert f"step {COLLAPSE_STEPS}: the router of layer {COLLAPSED_LAYER} collapsed" in started.read_log()
    lines = [json.loads(line) for line in (started.folder / "experts.jsonl").read_text().splitlines()]
    assert [line["layers"] for line in lines] == [[1, 2]] * 12


def test_a_router_that_balancing_mends_is_reported_no_more(runs: Runs) -> None:
    write_biased_model(runs.volume / "biased")
    # The bias moves by a quarter each step: after nine steps the favoured experts have lost their lead.
    moe = {"balancing": "ExpertBias", "expertBiasUpdateRate": 0.25}
    started = runs.start(model={"source": str(runs.volume / "biased")}, moe=moe, training=TRAINING)
    reports = watch_layers(started)
    assert [layers for layers in reports if layers is not None] in (
        [(COLLAPSED_LAYER,), ()],
        [(), (COLLAPSED_LAYER,), ()],
    )
    assert f"layer {COLLAPSED_LAYER} recovered" in started.read_log()
