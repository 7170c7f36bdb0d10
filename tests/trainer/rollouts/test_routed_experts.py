"""Routed experts as engines return them: taken where they are those of the answer, else refused by name."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fuzzing import damage_sample, random_sources
from moejob_api.contract.answers import EngineAnswer, WeightSpan
from moejob_trainer.rollouts.carried_answers import AnswerSegment
from moejob_trainer.rollouts.interface import GenerationRequest, RoutedLayers, SamplingParams
from moejob_trainer.rollouts.routed_experts import BadRouting, decode_routed_experts
from moejob_trainer.rollouts.wire import BadReply, WeightsLabel, read_answer

# Of four layers the first is dense.
LAYERS = RoutedLayers(layers=4, routed=(1, 2, 3), experts=8, per_token=2)
TOKENS = 5
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=8, stop_tokens=(1,), routing=LAYERS)
REQUEST = GenerationRequest(0, 0, np.array([4, 5, 6], np.int32), seed=1)

Array = npt.NDArray[Any]


def experts(tokens: int = TOKENS, of: RoutedLayers = LAYERS, kind: Any = np.uint8) -> Array:
    """Choices as vLLM writes them: zeros in dense layers."""
    random = np.random.default_rng(3)
    found = random.random((tokens, of.layers, of.experts)).argsort(-1)[..., : of.per_token].astype(kind)
    found[:, [layer for layer in range(of.layers) if layer not in of.routed]] = 0
    return found


def encoded(array: Array) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype.hasobject)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_the_layers_that_have_experts_are_taken(kind: Any) -> None:
    whole = experts(kind=kind)
    found = decode_routed_experts(encoded(whole), TOKENS, LAYERS)
    np.testing.assert_array_equal(found, whole[:, 1:])
    assert found.dtype == np.uint8


def test_more_experts_than_a_byte_counts_take_two() -> None:
    many = RoutedLayers(layers=1, routed=(0,), experts=256, per_token=2)
    found = decode_routed_experts(encoded(np.array([[[255, 0]]], np.uint8)), 1, many)
    assert found.dtype == np.int16
    # There is room for one number more than there are experts.
    assert (found + 1).tolist() == [[[256, 1]]]


def _with(value: int, layer: int = 2) -> Array:
    array = experts()
    array[3, layer, 1] = value
    return array


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(encoded(experts(4)), r"came as \(4, 4, 2\) .* where \(5, 4, 2\)", id="a token too few"),
        pytest.param(encoded(experts()[:, 1:]), r"\(5, 3, 2\) .* where \(5, 4, 2\)", id="dense layers left out"),
        pytest.param(encoded(experts()[..., :1]), r"\(5, 4, 1\)", id="a choice too few"),
        pytest.param(encoded(experts()[0]), "no array of experts", id="one token without its axis"),
        pytest.param(encoded(_with(8)), "expert 8 of a model that has 8", id="an expert that is not there"),
        pytest.param(encoded(experts(kind=np.int32) - 1), "no array of experts", id="an expert below none"),
        pytest.param(encoded(_with(int(experts()[3, 2, 0]))), "twice to one expert", id="the same expert twice"),
        pytest.param(encoded(experts(kind=np.float32)), "no array of experts", id="numbers that are not whole"),
        pytest.param(encoded(np.array([[[{}]]])), "no array of experts", id="a pickle"),
        pytest.param(encoded(np.asfortranarray(experts())), "no array of experts", id="axes the other way round"),
        pytest.param(encoded(experts())[:-8], "bytes where", id="an end that is missing"),
        pytest.param("é" + encoded(experts()), "no base64", id="no base64"),
        pytest.param("", "no array of experts", id="nothing"),
        pytest.param("A" * 4096, "came as 4096 characters", id="more than there can be"),
    ],
)
def test_what_is_not_the_routing_of_the_answer_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(BadRouting, match=reason):
        decode_routed_experts(text, TOKENS, LAYERS)


def test_a_header_that_claims_a_terabyte_takes_no_memory() -> None:
    content = base64.b64decode(encoded(experts()))
    claimed = content.replace(b"(5, 4, 2)", b"(9999999999, 99, 9)", 1)
    with pytest.raises(BadRouting, match=r"\(9999999999, 99, 9\)"):
        decode_routed_experts(base64.b64encode(claimed).decode(), TOKENS, LAYERS)


def test_damaged_routing_is_read_within_its_bounds_or_refused() -> None:
    whole = [encoded(experts()).encode(), encoded(experts(kind=np.uint16)).encode()]
    for draw in random_sources():
        try:
            found = decode_routed_experts(damage_sample(draw, whole).decode("latin-1"), TOKENS, LAYERS)
        except BadRouting:
            continue
        assert found.shape == (TOKENS, 3, 2)
        assert int(found.max()) < LAYERS.experts
        assert (found[..., 0] != found[..., 1]).all()


# --- in an answer ---------------------------------------------------------------------------------------------------


def _answer(routing: str | None, sampling: SamplingParams = SAMPLING) -> AnswerSegment:
    answer = EngineAnswer(
        tokens=np.array([7, 8, 1], "<i4").tobytes(),
        log_probabilities=np.full(3, -0.5, "<f4").tobytes(),
        spans=(WeightSpan(weights="2.here", start=0, end=3),),
        finish_reason="stop",
        routed_experts=routing,
    )
    return read_answer(REQUEST, sampling, answer.model_dump_json().encode(), WeightsLabel(3, "here"))


def test_an_answer_carries_the_experts_of_prompt_and_answer_but_the_last() -> None:
    found = _answer(encoded(experts(5))).routing
    assert found is not None
    np.testing.assert_array_equal(found, experts(5)[:, 1:])


def test_an_answer_without_the_experts_that_were_asked_for_is_none() -> None:
    with pytest.raises(BadReply, match="without the experts"):
        _answer(None)
    with pytest.raises(BadReply, match=r"\(3, 4, 2\) .* where \(5, 4, 2\)"):
        # Those of the tokens that were computed before an engine was lost, or of the answer alone.
        _answer(encoded(experts(3)))


def test_experts_that_were_not_asked_for_are_left_alone() -> None:
    assert _answer("rubbish", SamplingParams(1.0, 1.0, 8, (1,))).routing is None
