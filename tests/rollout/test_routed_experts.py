"""Engines say which experts each token went to: those that Transformers chooses, however the tokens were computed."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from engines import Engine
from rollout.references import make_model, save_published
from rollout.test_engine import updated
from trainer.rows import make_rows

Start = Callable[..., Engine]
Routing = npt.NDArray[np.int64]

PROMPTS = [[(7 * number + place) % 512 for place in range(40)] for number in range(6)]
# Dense first layers, and experts that are chosen by sigmoids in groups, beside shared ones.
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "mixtral": {"tensor": 2}, "glm4_moe": {}}


def returned(choice: dict[str, Any]) -> Routing:
    """Return the experts of each token, sorted. [tokens - 1, layers, k]"""
    found: Routing = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    return np.sort(found.astype(np.int64), -1)


def chosen(reference: Any, tokens: Sequence[int]) -> dict[int, Routing]:
    """Return what Transformers chooses in each layer that has experts, sorted. [tokens - 1, k]"""
    seen: dict[int, Routing] = {}
    hooks = []
    for number, layer in enumerate(reference.model.layers):
        if hasattr(layer.mlp, "gate"):

            def see(_: Any, __: Any, said: tuple[Tensor, Tensor, Tensor], number: int = number) -> None:
                seen[number] = said[2].sort(-1).values[:-1].numpy()

            hooks.append(layer.mlp.gate.register_forward_hook(see))
    with torch.no_grad():
        reference(torch.tensor([[*tokens]]))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture(scope="module", params=make_rows(FAMILIES, always=["qwen3_moe"]))
def told(
    request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Any]]:
    family: str = request.param
    engine = start(family, routingReplay=True, **FAMILIES[family]).await_ready()
    reference = make_model(family, 31)
    updated(engine, "1", save_published(reference, tmp_path_factory.mktemp(family)))
    yield engine, reference
    engine.kill()


def holds(reference: Any, prompt: Sequence[int], choice: dict[str, Any]) -> None:
    """Check the experts of a prompt and its answer."""
    found, expected = returned(choice), chosen(reference, [*prompt, *choice["token_ids"]])
    config = reference.config
    assert found.shape == (
        len(prompt) + len(choice["token_ids"]) - 1,
        config.num_hidden_layers,
        config.num_experts_per_tok,
    )
    for layer, experts in expected.items():
        np.testing.assert_array_equal(found[:, layer], experts, err_msg=f"layer {layer}")


def test_each_token_but_the_last_went_to_the_experts_that_transformers_chooses(told: tuple[Engine, Any]) -> None:
    engine, reference = told
    for seed, prompt in enumerate(PROMPTS):
        holds(reference, prompt, engine.generate(prompt, max_tokens=24, seed=seed)["choices"][0])


def test_a_prompt_that_is_cached_keeps_its_experts(told: tuple[Engine, Any]) -> None:
    engine, reference = told
    before = _cached_tokens(engine)
    # More than the cache's block of 128 tokens; again, with another end, and with no more than that block.
    long = [(11 * place + 3) % 512 for place in range(150)]
    for prompt in (long, long, [*long[:130], 5, 6, 7], long[:129]):
        holds(reference, prompt, engine.generate(prompt, max_tokens=8, seed=2)["choices"][0])
    assert _cached_tokens(engine) >= before + 3 * 128


def _cached_tokens(engine: Engine) -> float:
    found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} ([0-9.e+]+)$", engine.get("/metrics").body, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def test_members_of_a_group_that_are_computed_together_have_experts_of_their_own(told: tuple[Engine, Any]) -> None:
    engine, reference = told

    def answered(number: int) -> tuple[list[int], dict[str, Any]]:
        prompt = PROMPTS[number % len(PROMPTS)]
        return prompt, engine.generate(prompt, max_tokens=4 + number % 13, seed=number)["choices"][0]

    with ThreadPoolExecutor(48) as pool:
        for prompt, choice in pool.map(answered, range(48)):
            holds(reference, prompt, choice)


def test_new_weights_choose_anew_and_cached_experts_are_forgotten(told: tuple[Engine, Any], tmp_path: Path) -> None:
    engine, reference = told
    other = make_model(reference.config.model_type, 32)
    before = returned(engine.generate(PROMPTS[0], max_tokens=4, seed=1)["choices"][0])
    updated(engine, "2", save_published(other, tmp_path / "other"))
    choice = engine.generate(PROMPTS[0], max_tokens=4, seed=1)["choices"][0]
    holds(other, PROMPTS[0], choice)
    assert (returned(choice)[: len(PROMPTS[0])] != before[: len(PROMPTS[0])]).any()
    updated(engine, "3", save_published(reference, tmp_path / "again"))
