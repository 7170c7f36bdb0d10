"""The text that engines are compared on after each publication, and the distance that rounding may put them at.

The bound is measured, for nothing that is known beforehand gives it: of SmolLM2-135M in bfloat16, trainer and engine
are 0.07 apart in the mean over a token's log-probability, of a model with small logits 0.004. Each layer rounds its
sums, so the trainer's own answer to an embedding that was rounded once more is as far from its first one as that of an
engine that rounds in other places: 0.07 for that model, too, dense or as a mixture whose tokens change experts by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from moejob_api.job.grpo import ProbeMismatch
from moejob_trainer.data.packing import BatchPlan, batch_of_rank, batch_plan
from moejob_trainer.megatron.training_engine import MegatronEngine
from moejob_trainer.rollouts.interface import Floats, Tokens
from moejob_trainer.rollouts.publisher import Trial
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.prompts import RunPrompts
from moejob_trainer.training import Document

# Enough for a mean that is within a tenth of that of a longer text.
PROBE_TOKENS = 256
_PROMPTS = 32
# Never less, where a short text or a shallow model happens to round alike.
_LEAST = {torch.float32: 1e-3, torch.bfloat16: 0.01}
# Right engines were seen 0.5 to 2.2 times as far away, over whole runs of three trained models in bfloat16
# (docs/grpo.md): a few tokens that change experts are most of the mean, and an engine rounds in each layer. A layer's
# norm or projection that was left out is 8 times as far.
_ROUNDINGS = 4.0
_DRAWS = 4
_TOKEN_IDS = TypeAdapter(list[int])


def build_trial(context: RankContext, engine: MegatronEngine, prompts: RunPrompts) -> Trial:
    """Build the comparison that ends a publication. All ranks call it together."""
    if context.spec.grpo is None:
        raise ValueError(f"method {context.spec.method} has no engines")
    settings = context.spec.grpo.rollout.probe
    tokens = _probe_tokens(context, prompts)
    probe = EngineProbe(engine, batch_plan(context.spec, context.layout, pad_token=0))
    dtype = getattr(torch, context.spec.model.dtype.value)

    def bound() -> float:
        return probe_bound(dtype, probe.rounding(tokens, dtype)) if settings.bound is None else settings.bound

    return Trial(tokens, probe, bound, only_warns=settings.on_mismatch is ProbeMismatch.WARN)


def probe_bound(dtype: torch.dtype, rounding: float) -> float:
    """Return the largest mean distance of an engine, given what rounding does to the trainer's own answer."""
    return max(_LEAST[dtype], _ROUNDINGS * rounding)


def probe_text(prompts: Sequence[Sequence[int]], length: int) -> list[int]:
    """Return the prompts one after another, cut, or said again, to this length."""
    tokens = [token for prompt in prompts for token in prompt]
    return [int(token) for token in np.resize(tokens, length)]


def _probe_tokens(context: RankContext, prompts: RunPrompts) -> Tokens:
    # An engine that reads a text says one more token.
    length = max(2, min(PROBE_TOKENS, context.spec.data.max_length - 1))

    def read() -> list[int]:
        if prompts.sets is None:
            raise ValueError("rank 0 has the prompts")
        return probe_text([prompt.tokens for prompt in prompts.sets.training.first_prompts(_PROMPTS)], length)

    return np.array(context.on_first_rank(read, _TOKEN_IDS), np.int32)


class EngineProbe:
    """The trainer's log-probabilities of a text; every data rank asks its own copy of the model."""

    def __init__(self, engine: MegatronEngine, plan: BatchPlan) -> None:
        self._engine, self._plan, self._data = engine, plan, engine.groups.data

    def __call__(self, tokens: Tokens) -> Floats:
        """Return the log-probability of each token but the first. [N - 1]"""
        copies = [
            Document(tokens.astype(np.int64), np.ones(len(tokens), np.float32), number)
            for number in range(self._data.size)
        ]
        batches = batch_of_rank(copies, self._plan, self._data.rank)
        # Engines say what their weights make of a text, before any temperature.
        with self._engine.at_temperature(1.0):
            outputs = self._engine.outputs(batches)
        for batch, said in zip(batches, outputs, strict=True):
            for start, length in zip(batch.cu_lengths.tolist(), batch.lengths, strict=False):
                if length:
                    found: Floats = said.log_probabilities[start : start + length - 1].float().cpu().numpy()
                    return found
        raise RuntimeError("every data rank has one copy")

    def rounding(self, tokens: Tokens, dtype: torch.dtype) -> float:
        """Return the mean |change of a log-probability| where the embedding is rounded once more to this type."""
        plain = self(tokens)
        changes = []
        for seed in range(_DRAWS):
            with self._rounded_embedding(dtype, seed):
                changes.append(np.abs(self(tokens) - plain))
        return float(np.mean(changes))

    @contextmanager
    def _rounded_embedding(self, dtype: torch.dtype, seed: int) -> Iterator[None]:
        rounded = partial(rounded_once_more, torch.finfo(dtype).eps, seed)
        with ExitStack() as stack:
            for stage in self._engine.stages:
                if stage.place.is_first:
                    stack.callback(stage.embedding.register_forward_hook(rounded).remove)
            yield


def rounded_once_more(unit: float, seed: int, _: nn.Module, __: Any, embedded: Tensor) -> Tensor:
    """Change each number by up to one rounding, alike on ranks that hold the same numbers."""
    generator = torch.Generator(embedded.device).manual_seed(seed)
    shares = torch.rand(embedded.shape, generator=generator, device=embedded.device) * 2 - 1
    return (embedded.float() * (1 + unit * shares)).to(embedded.dtype)
