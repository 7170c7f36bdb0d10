"""The Triton kernels beside their twins on a machine without a GPU: Triton runs them in Python."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from gpu.twins import Place, assert_kernel

PLACE = Place("cpu", torch.float32)
BFLOAT16 = Place("cpu", torch.bfloat16)
Check = Callable[..., None]


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """`assert_kernel` in a process of its own: Triton interprets all or nothing, from its import on."""
    with (
        pytest.MonkeyPatch.context() as environment,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        environment.setenv("TRITON_INTERPRET", "1")
        assert process.submit(os.getenv, "TRITON_INTERPRET").result() == "1"

        def check(name: str, *arguments: Any, place: Place = PLACE) -> None:
            process.submit(assert_kernel, name, place, *arguments).result()

        yield check


@pytest.mark.parametrize("weighted", [True, False], ids=["with probabilities", "without"])
@pytest.mark.parametrize(("rows", "width"), [(3, 5), (2, 1030), (0, 4)])
@pytest.mark.parametrize("name", ["swiglu", "clamped swiglu"])
def test_gated_activations(check: Check, name: str, rows: int, width: int, weighted: bool) -> None:
    check(name, rows, width, weighted)


@pytest.mark.parametrize("shape", [(3, 5), (70, 2, 128), (5, 1000), (515, 2050), (0, 8)], ids=str)
def test_norms(check: Check, shape: tuple[int, ...]) -> None:
    check("norm", *shape)


def test_gradients_of_norms_are_added_to_their_sum(check: Check) -> None:
    check("norm sums", 70, 128)


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize(("heads", "dim", "turning"), [(3, 24, 24), (1, 8, 4), (4, 10, 6)])
def test_rotary(check: Check, heads: int, dim: int, turning: int, interleaved: bool) -> None:
    check("rotary", 5, heads, dim, turning, interleaved)


@pytest.mark.parametrize("dropped", [True, False], ids=["some dropped", "all kept"])
@pytest.mark.parametrize(("tokens", "choices", "width"), [(4, 1, 5), (3, 3, 2050)])
def test_sums_of_rows(check: Check, tokens: int, choices: int, width: int, dropped: bool) -> None:
    check("row sums", tokens, choices, width, dropped)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts"), [(4, 1, 5), (100, 8, 128), (300, 1, 1), (7, 2, 300), (64, 2, 2)]
)
def test_choices_in_the_order_of_experts(check: Check, tokens: int, choices: int, experts: int) -> None:
    check("order", tokens, choices, experts)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "ranks"), [(5, 2, 2, 2), (70, 8, 32, 4), (9, 3, 1, 3), (3, 1, 4, 1), (0, 2, 4, 2)]
)
def test_destinations_of_choices(check: Check, tokens: int, choices: int, experts: int, ranks: int) -> None:
    check("sent", tokens, choices, experts, ranks)


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(4, 1, 5), (300, 8, 128), (0, 2, 8)])
def test_choices_are_counted_by_document(check: Check, tokens: int, choices: int, experts: int) -> None:
    check("counts", tokens, choices, experts)


@pytest.mark.parametrize(("tokens", "experts"), [(3, 5), (70, 128), (2, 5000), (0, 8)])
def test_entropies_of_routing(check: Check, tokens: int, experts: int) -> None:
    check("entropies", tokens, experts)


@pytest.mark.parametrize(("tokens", "experts", "choices"), [(5, 8, 2), (70, 128, 8), (9, 60, 4), (3, 5, 1), (0, 8, 2)])
def test_routes_and_their_gradients(check: Check, tokens: int, experts: int, choices: int) -> None:
    check("routed", tokens, experts, choices)


@pytest.mark.parametrize(("tokens", "experts"), [(3, 5), (70, 128), (0, 8)])
def test_parts_of_a_gradient_are_the_gradient(check: Check, tokens: int, experts: int) -> None:
    check("parts", tokens, experts)


@pytest.mark.parametrize("dropped", [True, False], ids=["some dropped", "all kept"])
@pytest.mark.parametrize(("tokens", "choices", "width"), [(4, 1, 5), (3, 3, 2050), (0, 2, 8)])
def test_rows_of_peers(check: Check, tokens: int, choices: int, width: int, dropped: bool) -> None:
    check("peer rows", tokens, choices, width, dropped)


# Weights are bfloat16 in the first place; gradients and moments are not, of which the interpreter would cut off what
# bfloat16 rounds.
@pytest.mark.parametrize("place", [Place("cpu", torch.float16), PLACE], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("elements", "step", "scale"), [(5, 1, 1.0), (2048, 3, 0.25), (4099, 1000, 1.0), (0, 1, 1.0)])
def test_steps_of_adamw(check: Check, elements: int, step: int, scale: float, place: Place) -> None:
    check("adamw", elements, step, scale, place=place)


@pytest.mark.parametrize("place", [BFLOAT16, PLACE], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("tokens", "words", "existing"),
    [
        pytest.param(3, 128, 128, id="every word exists"),
        pytest.param(2, 128, 5, id="few words exist"),
        pytest.param(5, 9000, 8977, id="some blocks, words of no whole vector"),
        pytest.param(2, 8320, 8192, id="a block of words that do not exist"),
        pytest.param(1, 1, 1, id="one word"),
        pytest.param(0, 128, 128, id="no token"),
    ],
)
@pytest.mark.parametrize("learns_entropy", [False, True], ids=["", "entropy"])
def test_words(
    check: Check, tokens: int, words: int, existing: int, temperature: float, place: Place, learns_entropy: bool
) -> None:
    check("words", tokens, words, existing, temperature, learns_entropy, place=place)
