"""Mistakes in what is published of real models, and a real engine that the probe has to find them in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines import SECRET, Engine
from moejob_trainer.rollouts.connection import Connection
from moejob_trainer.rollouts.fleet import Fleet, FleetLimits
from moejob_trainer.rollouts.interface import Floats, Tokens, WrongWeights
from moejob_trainer.rollouts.publisher import Publisher, Trial
from moejob_trainer.rollouts.transports.disk import DiskTransport
from moejob_trainer.setup.probe import PROBE_TOKENS, probe_bound, probe_text, rounded_once_more
from real_models import DENSE, MIXTRAL, find_real_model

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

Weights = dict[str, Tensor]
Mistake = Callable[[Weights], None]
LIMITS = FleetLimits(start_seconds=900, silence_seconds=600, look_seconds=0.2)
SENTENCES = (
    "To find 9 + 4, what do we do? Answer with a number.",
    "The capital of France is Paris. What is the capital of Italy?",
    "Write a short poem about a river that forgets its name.",
    "Reverse the word 'engine' and count the letters of the result.",
    "Is a whale a fish? Give one reason.",
    "Sort the numbers 12, 7, 31 and 2 from large to small.",
)
LAYER, LAST = "model.layers.15", "model.layers.29"


def never_loaded(*names: str) -> Mistake:
    """Tensors as an engine has them that got none: small random numbers."""

    def change(weights: Weights) -> None:
        for name in names:
            weights[name] = (torch.rand(weights[name].shape) * 2e-3 - 1e-3).to(weights[name])

    return change


def expert(layer: str, number: int, matrix: str) -> str:
    return f"{layer}.block_sparse_moe.experts.{number}.{matrix}.weight"


def permute_experts(weights: Weights) -> None:
    for layer in (f"model.layers.{number}" for number in range(30)):
        for matrix in ("w1", "w2", "w3"):
            before = [weights[expert(layer, number, matrix)] for number in range(4)]
            for number in range(4):
                weights[expert(layer, number, matrix)] = before[(number + 1) % 4]


EVERYWHERE: dict[str, Mistake] = {
    "a norm": never_loaded(f"{LAYER}.input_layernorm.weight"),
    "the last norm": never_loaded("model.norm.weight"),
    "the embedding, which is the output layer": never_loaded("model.embed_tokens.weight"),
    "a layer's q_proj": never_loaded(f"{LAYER}.self_attn.q_proj.weight"),
    "the last layer's q_proj": never_loaded(f"{LAST}.self_attn.q_proj.weight"),
}
OF_EXPERTS: dict[str, Mistake] = {
    "one expert's matrix in the last layer": never_loaded(expert(LAST, 0, "w2")),
}
# In bfloat16 rounding changes the answers as much: experts of this model are copies of each other with 2 % of noise.
IN_FLOAT32: dict[str, Mistake] = {
    "one expert's matrix": never_loaded(expert(LAYER, 0, "w2")),
    "a router": never_loaded(f"{LAYER}.block_sparse_moe.gate.weight"),
    "all experts permuted": permute_experts,
}
CASES = [
    pytest.param(DENSE, "float32", EVERYWHERE, id="dense, float32"),
    pytest.param(DENSE, "bfloat16", EVERYWHERE, id="dense, bfloat16"),
    pytest.param(MIXTRAL, "float32", EVERYWHERE | OF_EXPERTS | IN_FLOAT32, id="mixture, float32"),
    pytest.param(MIXTRAL, "bfloat16", EVERYWHERE | OF_EXPERTS, id="mixture, bfloat16"),
]


class Reference:
    """Transformers in the place of the trainer: its log-probabilities, and the bound that follows from its rounding."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        chats = [[{"role": "user", "content": sentence}] for sentence in SENTENCES]
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids for chat in chats]
        self.tokens = np.array(probe_text(prompts, PROBE_TOKENS), np.int32)
        self.said = _said(model, self.tokens)
        changes = []
        for seed in range(2):
            hook = partial(rounded_once_more, torch.finfo(dtype).eps, seed)
            handle = model.get_input_embeddings().register_forward_hook(hook)
            changes.append(np.abs(_said(model, self.tokens) - self.said))
            handle.remove()
        self.bound = probe_bound(dtype, float(np.mean(changes)))

    def trial(self) -> Trial:
        return Trial(self.tokens, lambda _: self.said, lambda: self.bound)


def _said(model: Any, tokens: Tokens) -> Floats:
    row = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        rows = torch.log_softmax(model(row).logits[0].float(), -1)[:-1]
    picked: Floats = rows.gather(1, row[0, 1:, None])[:, 0].numpy()
    return picked


@contextmanager
def started_engine(model: Path, dtype: str, folder: Path) -> Iterator[Engine]:
    shutil.copytree(model, folder / "engine-model", ignore=shutil.ignore_patterns("*.safetensors"))
    job: dict[str, Any] = {
        "model": {"dtype": dtype},
        "data": {"maxLength": 512},
        "grpo": {"maxNewTokens": 64, "rollout": {"placement": "Separate"}},
    }
    engine = Engine(folder, folder / "engine.log", **job)
    try:
        yield engine.ready()
    finally:
        engine.kill()


@pytest.mark.parametrize(("name", "dtype", "mistakes"), CASES)
def test_each_mistake_in_what_is_published_is_seen_and_nothing_else(
    name: str, dtype: str, mistakes: dict[str, Mistake], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, kind = find_real_model(name), getattr(torch, dtype)
    trial = Reference(model, kind).trial()
    with started_engine(model, dtype, tmp_path) as engine:
        fleet = Fleet([engine.url], Connection(SECRET), LIMITS)
        publisher = Publisher(fleet, None, DiskTransport(tmp_path / "weights", None, LIMITS.start_seconds), trial)

        def distance(mistake: Mistake | None) -> float:
            weights = load_file(model / "model.safetensors")
            if mistake is not None:
                mistake(weights)
            report = publisher.publish(1, ((each, tensor.to(kind)) for each, tensor in weights.items()))
            return report.probe_mean

        try:
            right = distance(None)
            unseen = [label for label, mistake in mistakes.items() if not _is_seen(label, distance, mistake)]
            assert distance(None) == pytest.approx(right, rel=0.5)
        finally:
            publisher.close()
    print(json.dumps({"bound": trial.bound(), "right": right}))  # noqa: T201  # for the table of docs/grpo.md
    assert unseen == []


def _is_seen(label: str, distance: Callable[[Mistake], float], mistake: Mistake) -> bool:
    try:
        print(json.dumps({label: distance(mistake)}))  # noqa: T201
    except WrongWeights as wrong:
        print(f"{label}: {wrong}")  # noqa: T201
        return True
    return False
