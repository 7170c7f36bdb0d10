"""The text that engines are compared on after each publication, and the distance that rounding may put them at.

The bound is measured, because no formula gives it. In bfloat16 the mean distance of trainer and engine, over the
log-probabilities of tokens, is 0.07 for SmolLM2-135M and 0.004 for a model with small logits. Each layer rounds its
sums, and an engine rounds in other places. The trainer can imitate this: it rounds its embedding once more, and its
log-probabilities move as far as an engine's are away. For SmolLM2-135M that is 0.07 again, dense or as a mixture, in
which rounding sends some tokens to other experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moejob_trainer.data.packing import BatchPlan, build_rank_batch
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.rollouts.interface import Floats, Tokens
from moejob_trainer.training import Document

# With this many tokens the mean is within a tenth of the mean over a longer text.
PROBE_TOKENS = 256
PROBE_PROMPTS = 32
# The least bound: a short text or a shallow model may happen to round alike.
_LEAST = {torch.float32: 1e-3, torch.bfloat16: 0.01}
# Right engines were seen 0.5 to 2.2 times as far away, over whole runs of three trained models in bfloat16
# (docs/grpo.md): a few tokens that change experts are most of the mean, and an engine rounds in each layer. A layer's
# norm or projection that was left out is 8 times as far.
_ROUNDINGS = 4.0
_DRAWS = 4


def probe_bound(dtype: torch.dtype, rounding: float) -> float:
    """Return the largest mean distance of an engine, given the distance that rounding makes in the trainer."""
    return max(_LEAST[dtype], _ROUNDINGS * rounding)


def probe_text(prompts: Sequence[Sequence[int]], length: int) -> list[int]:
    """Return the prompts one after another, cut or repeated to this length."""
    tokens = [token for prompt in prompts for token in prompt]
    return [int(token) for token in np.resize(tokens, length)]


class TrainerProbe:
    """The trainer's log-probabilities of a text; every data rank computes them with its own copy of the model."""

    def __init__(self, engine: MegatronTrainingEngine, plan: BatchPlan) -> None:
        self._engine, self._plan, self._data = engine, plan, engine.groups.data

    def __call__(self, tokens: Tokens) -> Floats:
        """Return the trainer's log-probability of each token but the first, at temperature 1. [N - 1]"""
        copies = [
            Document(tokens.astype(np.int64), np.ones(len(tokens), np.float32), number)
            for number in range(self._data.size)
        ]
        batches = build_rank_batch(copies, self._plan, self._data.rank)
        # Engines return log-probabilities of a prompt at temperature 1.
        with self._engine.at_temperature(1.0):
            outputs = self._engine.compute_outputs(batches)
        for batch, output in zip(batches, outputs, strict=True):
            for start, length in zip(batch.cu_lengths.tolist(), batch.lengths, strict=False):
                if length:
                    log_probabilities: Floats = (
                        output.log_probabilities[start : start + length - 1].float().cpu().numpy()
                    )
                    return log_probabilities
        raise RuntimeError("every data rank has one copy")

    def measure_rounding(self, tokens: Tokens, dtype: torch.dtype) -> float:
        """Return the mean |change of a log-probability| where the embedding is rounded once more to this type."""
        plain = self(tokens)
        changes = []
        for seed in range(_DRAWS):
            with self._rounded_embedding(dtype, seed):
                changes.append(np.abs(self(tokens) - plain))
        return float(np.mean(changes))

    @contextmanager
    def _rounded_embedding(self, dtype: torch.dtype, seed: int) -> Iterator[None]:
        rounded = partial(round_once_more, torch.finfo(dtype).eps, seed)
        with ExitStack() as stack:
            for stage in self._engine.stages:
                if stage.place.is_first:
                    stack.callback(stage.embedding_module.register_forward_hook(rounded).remove)
            yield


def round_once_more(unit: float, seed: int, _: nn.Module, __: Any, embedded: Tensor) -> Tensor:
    """Change each number by up to one rounding; ranks with the same numbers make the same changes."""
    generator = torch.Generator(embedded.device).manual_seed(seed)
    shares = torch.rand(embedded.shape, generator=generator, device=embedded.device) * 2 - 1
    return (embedded.float() * (1 + unit * shares)).to(embedded.dtype)
