"""A step and a layer's mixture beside Transformers with grouped experts, in one run on one GPU.

    python -m benchmarks.trainer.peers --micro 4 --accumulate 4 --gradients bfloat16

Takes the options of `gpu_step`. Transformers trains the same shape in bfloat16 as its users do: attention by torch,
fused AdamW, clipping. Prints a JSON line for each way as soon as it is there, and at the end how many times as fast
the trainer is; a way that fails, for want of memory say, prints its error.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks.trainer.engines import stack, synchronize
from benchmarks.trainer.gpu_step import STEPS, WARM, attention_here, job, measure_case, parser
from benchmarks.trainer.in_turn import Line, in_turn
from moejob_api.models import catalog
from moejob_trainer.distributed.groups import ALONE, Groups
from moejob_trainer.layers.documents import Documents
from moejob_trainer.model.architecture import read_architecture
from moejob_trainer.model.layer import moe_settings
from moejob_trainer.model.linear import TensorShare
from moejob_trainer.model.moe_layer import MoELayer
from moejob_trainer.model.packed_batch import LocalTokens, make_packed_batch

REPEATS, WARM_REPEATS = 20, 5
_SPEED = "tokensPerSecondPerGpu"
_CASE_SECONDS = 240


def main() -> None:
    """Measures and prints."""
    chosen = parser().parse_args()
    ways: dict[str, Callable[[argparse.Namespace, torch.device], Line]] = {
        "step": measure_case,
        "step of Transformers": _transformers_step,
        "mixture": _mixture,
        "mixture of Transformers": _transformers_mixture,
    }
    lines = in_turn(list(ways), lambda number, device: list(ways.values())[number](chosen, device), _CASE_SECONDS)
    found = dict(zip(ways, lines or [], strict=False))
    for name in ("step", "mixture"):
        ours, theirs = found.get(name, {}), found.get(f"{name} of Transformers", {})
        if _SPEED in ours and _SPEED in theirs:
            print(json.dumps(compare_lines(name, ours, theirs)), flush=True)


def compare_lines(name: str, ours: Line, theirs: Line) -> Line:
    """Return the line of both, which goes into the page."""
    about = {key: theirs[key] for key in ("peer", "case", "torch", "device")}
    mine, other = float(str(ours[_SPEED])), float(str(theirs[_SPEED]))
    return {"compared": name, **about, _SPEED: mine, "peerSpeed": other, "timesAsFast": round(mine / other, 2)}


def _transformers_step(chosen: argparse.Namespace, device: torch.device) -> Line:
    with device:
        model = AutoModelForCausalLM.from_config(
            _config(chosen), dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    random, seconds = np.random.default_rng(1), []
    for _ in range(STEPS):
        tokens = torch.from_numpy(
            random.integers(0, model.config.vocab_size, (chosen.accumulate, chosen.micro, chosen.length))
        ).to(device)
        synchronize(device)
        begun = time.perf_counter()
        for batch in tokens:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            (loss / chosen.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return _line(chosen, device, "Transformers", float(np.median(seconds[WARM:])), chosen.accumulate)


def _mixture(chosen: argparse.Namespace, device: torch.device) -> Line:
    """A layer's router and experts, forward and backward; gradients of experts' weights are added up as in training."""
    model = read_architecture(dict(catalog.find_config(chosen.model) or {}))
    shape = model.shape.experts
    if shape is None:
        raise ValueError(f"{chosen.model} has no experts; name a mixture")
    settings = moe_settings(model, job(chosen, device))
    with device:
        share = TensorShare(ALONE, sequence_parallel=False)
        layer = MoELayer(shape, model.shape.hidden, Groups(), share, settings).to(torch.bfloat16)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    for parameter in layer.experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=getattr(torch, chosen.gradients))  # type: ignore[attr-defined]
    documents = Documents.from_lengths([chosen.length] * chosen.micro)
    segments = documents.segment_ids().to(device)
    own = LocalTokens(torch.ones_like(segments, dtype=torch.bool), segments)
    packed = make_packed_batch(documents, model.rotary, None, own)
    seconds = _median_seconds(layer, lambda x: layer(x, packed), _tokens(chosen, model.shape.hidden, device), device)
    return _line(chosen, device, "moejob", seconds, 1)


def _transformers_mixture(chosen: argparse.Namespace, device: torch.device) -> Line:
    config = _config(chosen)
    with device:
        # A whole model, for blocks have another name in each family; one layer of it.
        config.num_hidden_layers = 1
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")
    block = model.model.layers[0].mlp

    def mix_tokens(x: Tensor) -> Tensor:
        y: Tensor | tuple[Tensor, ...] = block(x.view(chosen.micro, chosen.length, -1))
        return y[0] if isinstance(y, tuple) else y

    seconds = _median_seconds(block, mix_tokens, _tokens(chosen, config.hidden_size, device), device)
    return _line(chosen, device, "Transformers", seconds, 1)


def _tokens(chosen: argparse.Namespace, hidden: int, device: torch.device) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.randn(chosen.micro * chosen.length, hidden, device=device, dtype=torch.bfloat16)
    return tokens.requires_grad_()


def _median_seconds(layer: nn.Module, mixed: Callable[[Tensor], Tensor], x: Tensor, device: torch.device) -> float:
    """Return the median seconds of a forward and a backward pass."""
    slope, seconds = torch.randn_like(x), []
    for _ in range(WARM_REPEATS + REPEATS):
        x.grad = None
        layer.zero_grad()
        synchronize(device)
        begun = time.perf_counter()
        y = mixed(x)
        y.backward(slope.view_as(y))
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds[WARM_REPEATS:]))


def _config(chosen: argparse.Namespace) -> PretrainedConfig:
    config: dict[str, Any] = dict(catalog.find_config(chosen.model) or {}) | {"num_hidden_layers": chosen.layers}
    made: PretrainedConfig = AutoConfig.for_model(**config)
    return made


def _line(chosen: argparse.Namespace, device: torch.device, name: str, seconds: float, batches: int) -> Line:
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "peer": name,
        "case": vars(chosen) | {"attention": attention_here()},
        "secondsPerStep": round(seconds, 6),
        _SPEED: round(batches * chosen.micro * chosen.length / seconds),
        "peakGiB": round(peak / 2**30, 1),
        **stack(device),
    }


if __name__ == "__main__":
    main()
