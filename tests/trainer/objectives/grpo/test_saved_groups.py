"""Finished groups as arrays of a checkpoint: every bit comes back, and what is not whole is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moejob_trainer.checkpoints.array_file import read_arrays, size_bytes, write_arrays
from moejob_trainer.data.blending import DocumentKey
from moejob_trainer.data.prompt_loader import NumberedPrompt
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.distributed.encoding import Array
from moejob_trainer.errors import BadConfiguration, BadData
from moejob_trainer.objectives.grpo.sampling import AnswerGroup, FinishedGroup, ScoredAnswer
from moejob_trainer.objectives.grpo.saved_groups import (
    pack_groups,
    prompt_rows,
    read_prompt_rows,
    unpack_groups,
)
from moejob_trainer.rewards.scorer import CompletionScore
from moejob_trainer.rollouts.interface import Answer, FinishReason, GenerationRequest

NOW, KEY = 12.5, DocumentKey(0, 3)
INT32 = st.integers(-(2**31), 2**31 - 1)
TEXTS = st.text(st.characters(), max_size=8)
ROUTING_TYPES = st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.int8])


def numbers(count: int, dtype: type, elements: st.SearchStrategy[Any]) -> st.SearchStrategy[Array]:
    return hnp.arrays(dtype, count, elements=elements)


@st.composite
def scored_answers(draw: st.DrawFn, prompt: NumberedPrompt, member: int) -> ScoredAnswer:
    count = draw(st.integers(0, 5))
    read = len(prompt.prompt.tokens) + count - 1
    shapes = st.tuples(st.just(read), st.integers(0, 3), st.integers(0, 2))
    routing = draw(st.none() | ROUTING_TYPES.flatmap(lambda dtype: hnp.arrays(dtype, shapes)))
    tokens = np.array(prompt.prompt.tokens, np.int32)
    answer = Answer(
        GenerationRequest(prompt.number, member, tokens, draw(st.integers(0, 2**63 - 1))),
        draw(numbers(count, np.int32, INT32)),
        draw(numbers(count, np.float32, st.floats(width=32))),
        draw(numbers(count, np.int32, INT32)),
        draw(st.sampled_from(FinishReason)),
        routing,
    )
    score = CompletionScore(draw(st.floats()), draw(st.dictionaries(TEXTS, st.floats(), max_size=3)))
    return ScoredAnswer(answer, draw(TEXTS), score, draw(st.floats()), NOW)


@st.composite
def finished_groups(draw: st.DrawFn, number: int) -> FinishedGroup:
    tokens = tuple(draw(st.lists(INT32, min_size=1, max_size=4)))
    key = DocumentKey(draw(st.integers(0, 2)), draw(st.integers(0, 2**40)))
    prompt = NumberedPrompt(number, Prompt(tokens, "?", {"answer": number}, f"line {number}"), key)
    members = draw(st.integers(1, 3))
    answers = tuple(draw(scored_answers(prompt, member)) for member in range(members))
    return FinishedGroup(AnswerGroup(prompt, answers), draw(st.integers(0, 2**40)))


@st.composite
def several_groups(draw: st.DrawFn) -> list[FinishedGroup]:
    prompt_numbers = draw(st.lists(st.integers(0, 2**62), unique=True, max_size=3))
    return [draw(finished_groups(number)) for number in prompt_numbers]


def reader(groups: list[FinishedGroup]) -> Callable[[int, DocumentKey], NumberedPrompt]:
    prompts = {(group.group.prompt.number, group.group.prompt.key): group.group.prompt for group in groups}
    return lambda number, key: prompts[number, key]


def bits(value: object) -> object:
    """Return a value such that equal ones have equal bits and equal types, NaN included."""
    match value:
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case float():
            return float, np.float64(value).tobytes()
        case dict():
            return [(key, bits(element)) for key, element in value.items()]
        case tuple() | list():
            return [bits(element) for element in value]
        case _ if dataclasses.is_dataclass(value):
            return type(value), [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
        case _:
            return type(value), value


@given(groups=several_groups())
def test_every_bit_comes_back(groups: list[FinishedGroup]) -> None:
    assert bits(unpack_groups(pack_groups(groups), reader(groups), NOW)) == bits(groups)


@given(groups=several_groups())
def test_every_bit_comes_back_from_a_file(
    groups: list[FinishedGroup], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tmp_path_factory.mktemp("groups") / "groups.safetensors"
    if arrays := pack_groups(groups):
        write_arrays(path, arrays)
        assert path.stat().st_size == size_bytes(arrays)
        assert bits(unpack_groups(read_arrays(path), reader(groups), NOW)) == bits(groups)


def test_no_groups_are_no_arrays() -> None:
    assert pack_groups([]) == {}
    assert unpack_groups({}, reader([]), NOW) == []


def test_what_an_answer_consists_of_is_what_is_saved() -> None:
    """A field that is new here has to be packed, or a resumed run trains on other answers."""
    names = {kind: [field.name for field in dataclasses.fields(kind)] for kind in (FinishedGroup, AnswerGroup)}
    assert names == {FinishedGroup: ["group", "version"], AnswerGroup: ["prompt", "answers"]}
    assert [field.name for field in dataclasses.fields(ScoredAnswer)] == [
        *("answer", "text", "score", "reward", "answered_at")
    ]
    assert [field.name for field in dataclasses.fields(Answer)] == [
        *("request", "tokens", "log_probabilities", "versions", "finish_reason", "routing")
    ]
    assert [field.name for field in dataclasses.fields(GenerationRequest)] == ["group", "member", "prompt", "seed"]
    assert [field.name for field in dataclasses.fields(CompletionScore)] == ["total", "parts"]


def group(number: int = 7, *, routing: bool = False, key: DocumentKey | None = KEY) -> FinishedGroup:
    prompt = NumberedPrompt(number, Prompt((3, 4), "?", {}, f"line {number}"), key)

    def answer(member: int) -> ScoredAnswer:
        request = GenerationRequest(number, member, np.array([3, 4], np.int32), 99)
        tokens = np.array([5, 6, 1], np.int32)
        experts = np.zeros((4, 2, 1), np.uint8) if routing else None
        versions = np.full(3, 2, np.int32)
        generated = Answer(request, tokens, np.full(3, -0.5, np.float32), versions, FinishReason.STOP, experts)
        return ScoredAnswer(generated, "yes", CompletionScore(1.0, {"match": 1.0}), 1.0, NOW)

    return FinishedGroup(AnswerGroup(prompt, (answer(0), answer(1))), 2)


def packed(**changes: Array | None) -> dict[str, Array]:
    """Arrays of two groups, with some replaced or left out."""
    arrays = pack_groups([group(7, routing=True), group(8)])
    replaced = arrays | {name.replace("_", "."): array for name, array in changes.items() if array is not None}
    return {name: array for name, array in replaced.items() if changes.get(name.replace(".", "_"), 0) is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"group_version": None}, "have no group.version", id="an array is missing"),
        pytest.param(
            {"routing_1": None}, r"3 tokens to prompt 7 of 2 \(routing.1 .* are absent", id="experts are missing"
        ),
        pytest.param(
            {"routing_1": np.zeros((5, 2, 1), np.uint8)},
            r"routing.1 .* are uint8 \[5, 2, 1\], .* for 4",
            id="more experts",
        ),
        pytest.param({"routing_0": np.zeros((4, 2, 1), np.float32)}, "are float32", id="experts that are no integers"),
        pytest.param({"routing_9": np.zeros(1, np.uint8)}, "with routing.9, unknown", id="experts of no answer"),
        pytest.param(
            {"token_id": np.zeros(12, np.int64)}, r"token.id .* is int64 \[12\], .* int32 \[12\]", id="a type"
        ),
        pytest.param(
            {"token_id": np.zeros(11, np.int32)}, r"token.id .* int32 \[11\], .* \[12\], for tokens", id="cut"
        ),
        pytest.param({"token_id": np.zeros((12, 1), np.int32)}, r"is int32 \[12, 1\]", id="another rank"),
        pytest.param(
            {"group_answers": np.array([3, 2])}, r"answer.member .* \[4\], .* \[5\], for answers", id="counts"
        ),
        pytest.param({"group_answers": np.array([5, -1])}, "group.answers .* is -1", id="a negative count"),
        pytest.param({"group_number": np.array([7, 7])}, "groups have prompt 7 more than once", id="one prompt twice"),
        pytest.param(
            {"answer_finishReason": np.full(4, 9, np.uint8)}, "is 9 to 9, and has to be below 2", id="another reason"
        ),
        pytest.param({"answer_rewardNames": np.full(4, -1)}, "is -1 to -1", id="other rewards"),
        pytest.param({"text_bytes": np.full(12, 255, np.uint8)}, "answer to prompt 7 is no UTF-8", id="no text"),
        pytest.param({"labels": np.frombuffer(b"{}", np.uint8)}, "labels .* cannot be read", id="labels"),
        pytest.param(
            {"labels": np.frombuffer(pack_groups([group()])["labels"].tobytes().replace(b"-1", b"-9"), np.uint8)},
            "have the format moejob-finished-groups-9, and this version reads moejob-finished-groups-1",
            id="another format",
        ),
    ],
)
def test_what_is_not_whole_is_refused_with_what_is_wrong(changes: dict[str, Array | None], message: str) -> None:
    groups = [group(7, routing=True), group(8)]
    with pytest.raises(BadConfiguration, match=message) as refusal:
        unpack_groups(packed(**changes), reader(groups), NOW)
    assert "remove this checkpoint to resume from an older one" in str(refusal.value)


def test_a_prompt_with_other_tokens_than_its_answers_saw_is_refused() -> None:
    other = dataclasses.replace(group().group.prompt, prompt=Prompt((3, 5), "?", {}, "line 7"))
    with pytest.raises(BadData, match=re.escape("prompt 7 (line 7) has other tokens than when it was answered")):
        unpack_groups(pack_groups([group()]), lambda *_: other, NOW)


def changed_answer(**fields: Any) -> FinishedGroup:
    finished = group()
    first, second = finished.group.answers
    answer = dataclasses.replace(second, answer=dataclasses.replace(second.answer, **fields))
    return dataclasses.replace(finished, group=dataclasses.replace(finished.group, answers=(first, answer)))


@pytest.mark.parametrize(
    ("finished", "message"),
    [
        pytest.param(group(key=None), "prompt 7 is of no training data", id="an evaluation"),
        pytest.param(
            dataclasses.replace(group(), group=AnswerGroup(group().group.prompt, ())), "has no answers", id="no answers"
        ),
        pytest.param(changed_answer(routing=np.zeros((3, 2, 1), np.uint8)), "has experts uint8", id="too few experts"),
        pytest.param(changed_answer(versions=np.zeros(2, np.int32)), "has numbers int32", id="too few versions"),
        pytest.param(changed_answer(tokens=np.zeros(3, np.int64)), "has numbers int64", id="wide tokens"),
        pytest.param(
            changed_answer(request=GenerationRequest(6, 1, np.array([3, 4], np.int32), 1)), "as group 6", id="group"
        ),
        pytest.param(
            changed_answer(request=GenerationRequest(7, 1, np.array([3, 9], np.int32), 1)),
            "another prompt",
            id="prompt",
        ),
    ],
)
def test_what_no_resume_could_read_is_not_saved(finished: FinishedGroup, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_groups([finished])


def test_unfinished_prompts_are_read_again_by_number_and_document() -> None:
    prompts = [group(number).group.prompt for number in (7, 9)]
    rows = prompt_rows(prompts)
    assert rows == [[7, 0, 3], [9, 0, 3]]
    assert read_prompt_rows(rows, reader([group(7), group(9)])) == tuple(prompts)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param([[1, 0, 3], [1, 0, 4]], "unfinished prompts have prompt 1 more than once", id="twice"),
        pytest.param([[1, 0]], "unfinished prompts cannot be read", id="no document"),
        pytest.param(None, "unfinished prompts cannot be read", id="nothing"),
    ],
)
def test_rows_that_name_no_prompts_are_refused(rows: object, message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        read_prompt_rows(rows, reader([group(1)]))
