"""Says what the trainer's own model answers greedily with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_api.models.shape import Family
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.data.packing import batch_plan, build_global_batch
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.state import StateFiles
from moejob_trainer.megatron.topology import start_groups, stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.training import Document
from trainer.parity.cells import Cell, build_blank_engine


def greedy(model: Path, checkpoint: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return that many tokens for each prompt; `model/first` has the config. One rank's part, which is alone."""
    use_cpu()
    cell = Cell(Family.QWEN3_MOE, {"data": {"maxLength": 128}})
    try:
        engine = build_blank_engine(cell, model, start_groups(cell.layout(), cell.spec().moe.dispatcher))
        with ThreadPoolExecutor(1) as background:
            files = StateFiles(engine, build_tensor_table(engine.model.shape).parameters, background)
            files.read(checkpoint, weights_only=True)
        return [_continued(engine, [*prompt], count) for prompt in prompts]
    finally:
        stop_groups()


def _continued(engine: MegatronTrainingEngine, tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        tokens.append(int(_logits(engine, tokens).argmax()))
    return tokens[-count:]


def _logits(engine: MegatronTrainingEngine, tokens: Sequence[int]) -> Tensor:
    """Of the token that comes next. [vocabulary]"""
    found: list[Tensor] = []
    stage = engine.stages[0]
    handle = stage.final_norm.register_forward_hook(lambda _module, _given, made: found.append(made))
    try:
        document = Document(np.array(tokens, np.int64), np.ones(len(tokens), np.float32), 0)
        plan = batch_plan(engine.spec, layout_of(engine.spec.parallelism, 8), pad_token=0)
        engine.compute_outputs(build_global_batch([document], plan)[0])
    finally:
        handle.remove()
    weight: Tensor = stage.output.weight
    with torch.no_grad():
        return found[0].reshape(-1, weight.shape[1])[len(tokens) - 1] @ weight[: engine.model.shape.vocabulary].T
