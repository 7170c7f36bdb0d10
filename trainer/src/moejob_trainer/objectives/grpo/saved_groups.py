"""Finished groups as arrays of a checkpoint, and back without the change of a bit. Pure.

A step that trains while engines answer leaves groups behind that are finished, scored and not taken yet. They cost as
much as a step, so a checkpoint has them; of unfinished groups it has the numbers of their prompts, which are asked
again. Knows nothing of files, nor of which groups a step may take.

Arrays lie one group, answer or token after another, and counts say where each begins. Two groups, of answers a b, c and
d, have

    group.answers  1 2      answer.tokens  2 1 1      token.id  a b c d

Experts are by far the most bytes. They stay as engines returned them, `routing.N` of answer N: no second copy is made.
A prompt is read again from the data. Its tokens are saved nevertheless, as proof that it is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from moejob_api.job.grpo import Grpo
from moejob_trainer.data.blending import DocumentKey
from moejob_trainer.data.prompt_loader import OTHER_CHECKPOINT, NumberedPrompt
from moejob_trainer.distributed.encoding import Array
from moejob_trainer.errors import BadConfiguration, BadData
from moejob_trainer.objectives.grpo.sampling import AnswerGroup, FinishedGroup, ScoredAnswer
from moejob_trainer.rewards.scorer import CompletionScore
from moejob_trainer.rollouts.interface import Answer, FinishReason, GenerationRequest, SamplingParams

FORMAT = "moejob-finished-groups-1"
# The dtype of each array, in the order in which counts are read: a count comes before what it counts.
_LABELS = "labels"
_OF_GROUPS: Mapping[str, type] = {
    "group.number": np.int64,
    "group.source": np.int64,
    "group.document": np.int64,
    "group.version": np.int64,
    "group.promptTokens": np.int64,
    "group.answers": np.int64,
}
_OF_ANSWERS: Mapping[str, type] = {
    "answer.member": np.int64,
    "answer.seed": np.int64,
    "answer.tokens": np.int64,
    "answer.textBytes": np.int64,
    # Their places in the labels.
    "answer.finishReason": np.uint8,
    "answer.rewardNames": np.int64,
    "answer.reward": np.float64,
    "answer.total": np.float64,
    "answer.hasRouting": np.uint8,
}
_OF_TOKENS: Mapping[str, type] = {"token.id": np.int32, "token.logProbability": np.float32, "token.version": np.int32}
_PROMPT_TOKENS, _TEXTS, _PARTS = "prompt.tokens", "text.bytes", "part.value"
# A tokenizer may cut a character in two, and decoders may return halves of surrogate pairs.
_ENCODING = ("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class _Labels:
    """The texts of all groups: reasons of an end, and the names of rewards of an answer, each combination once."""

    format: str
    finish_reasons: tuple[FinishReason, ...]
    reward_names: tuple[tuple[str, ...], ...]


_labels = TypeAdapter(_Labels)
_rows = TypeAdapter(tuple[tuple[int, int, int], ...])


def prompt_rows(prompts: Sequence[NumberedPrompt]) -> list[list[int]]:
    """Return the number, source and document of each prompt: plain JSON."""
    return [[prompt.number, *_require_key(prompt)] for prompt in prompts]


def read_prompt_rows(
    rows: object, read_prompt: Callable[[int, DocumentKey], NumberedPrompt]
) -> tuple[NumberedPrompt, ...]:
    """Return the prompts of such rows; BadConfiguration where these are none, or have a number twice."""
    try:
        parsed_rows = _rows.validate_python(rows, strict=False)
    except ValidationError as error:
        raise _unusable_error(f"its unfinished prompts cannot be read: {error}") from error
    _require_distinct([number for number, _, _ in parsed_rows], "unfinished prompts")
    return tuple(read_prompt(number, DocumentKey(source, document)) for number, source, document in parsed_rows)


def sampling_fingerprint(grpo: Grpo, params: SamplingParams) -> str:
    """Return a hash of the settings that a finished group depends on, beside prompts and weights.

    Answers of other settings have other probabilities, and rewards of others are no rewards of this job.
    """
    rewards = [reward.model_dump_json() for reward in grpo.rewards]
    settings = (grpo.group_size, rewards, grpo.overlong.model_dump_json(), params)
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


def pack_groups(groups: Sequence[FinishedGroup]) -> dict[str, Array]:
    """Return groups as arrays by name; none where there are no groups."""
    if not groups:
        return {}
    answers = [answer for finished in groups for answer in finished.group.answers]
    for finished in groups:
        _require_packable(finished.group)
    combinations = list(dict.fromkeys(tuple(answer.score.parts) for answer in answers))
    labels = _Labels(FORMAT, tuple(FinishReason), tuple(combinations))
    texts = [answer.text.encode(*_ENCODING) for answer in answers]
    return {
        _LABELS: np.frombuffer(json.dumps(asdict(labels)).encode(), np.uint8),
        **_group_arrays(groups),
        **_answer_arrays(answers, texts, labels),
        **_token_arrays([answer.answer for answer in answers]),
        _TEXTS: np.frombuffer(b"".join(texts), np.uint8),
        _PARTS: np.fromiter(chain.from_iterable(answer.score.parts.values() for answer in answers), np.float64),
        **{
            f"routing.{number}": answer.answer.routing
            for number, answer in enumerate(answers)
            if answer.answer.routing is not None
        },
    }


def unpack_groups(
    arrays: Mapping[str, Array], read_prompt: Callable[[int, DocumentKey], NumberedPrompt], now: float
) -> list[FinishedGroup]:
    """Return the groups of such arrays. `now` is when their answers arrive in this run.

    BadConfiguration where the arrays are not those of whole groups, BadData where a prompt is another one.
    """
    return _GroupReader(arrays, read_prompt, now).read_groups() if arrays else []


# --- to arrays --------------------------------------------------------------------------------------------------------


def _require_key(prompt: NumberedPrompt) -> tuple[int, int]:
    if prompt.key is None:
        raise ValueError(f"prompt {prompt.number} is of no training data, and cannot be read again")
    return prompt.key.source, prompt.key.document


def _require_packable(group: AnswerGroup) -> None:
    """Refuse now what a resume would refuse: then it is too late."""
    number, tokens = group.prompt.number, group.prompt.prompt.tokens
    _require_key(group.prompt)
    if not group.answers:
        raise ValueError(f"the group of prompt {number} has no answers")
    for answer in (scored.answer for scored in group.answers):
        request = answer.request
        if request.group != number or not np.array_equal(request.prompt, np.asarray(tokens, np.int32)):
            raise ValueError(f"an answer to prompt {number} was asked with another prompt, as group {request.group}")
        for array, dtype in zip(_answer_tokens(answer), _OF_TOKENS.values(), strict=True):
            if array.dtype != dtype or array.shape != (len(answer.tokens),):
                raise ValueError(f"an answer of {answer.tokens.shape} tokens has numbers {array.dtype} {array.shape}")
        if answer.routing is not None and not _is_routing(answer.routing, len(tokens), len(answer.tokens)):
            raise ValueError(
                f"an answer of {len(answer.tokens)} tokens to a prompt of {len(tokens)} has experts "
                f"{answer.routing.dtype} {answer.routing.shape}"
            )


def _answer_tokens(answer: Answer) -> tuple[Array, Array, Array]:
    return answer.tokens, answer.log_probabilities, answer.versions


def _is_routing(routing: Array, prompt_tokens: int, answer_tokens: int) -> bool:
    """Return whether these are experts of all tokens but the last, which the engine never read."""
    is_whole = routing.ndim == 3 and len(routing) == max(prompt_tokens + answer_tokens - 1, 0)
    return is_whole and routing.dtype.kind in "iu" and routing.dtype.isnative


def _group_arrays(groups: Sequence[FinishedGroup]) -> dict[str, Array]:
    prompts = [finished.group.prompt for finished in groups]
    keys = [_require_key(prompt) for prompt in prompts]
    columns: Sequence[Sequence[int]] = [
        [prompt.number for prompt in prompts],
        [source for source, _ in keys],
        [document for _, document in keys],
        [finished.version for finished in groups],
        [len(prompt.prompt.tokens) for prompt in prompts],
        [len(finished.group.answers) for finished in groups],
    ]
    tokens = chain.from_iterable(prompt.prompt.tokens for prompt in prompts)
    return _typed_arrays(_OF_GROUPS, columns) | {_PROMPT_TOKENS: np.fromiter(tokens, np.int32)}


def _answer_arrays(answers: Sequence[ScoredAnswer], texts: Sequence[bytes], labels: _Labels) -> dict[str, Array]:
    places = {names: place for place, names in enumerate(labels.reward_names)}
    columns: Sequence[Sequence[float]] = [
        [answer.answer.request.member for answer in answers],
        [answer.answer.request.seed for answer in answers],
        [len(answer.answer.tokens) for answer in answers],
        [*map(len, texts)],
        [labels.finish_reasons.index(answer.answer.finish_reason) for answer in answers],
        [places[tuple(answer.score.parts)] for answer in answers],
        [answer.reward for answer in answers],
        [answer.score.total for answer in answers],
        [answer.answer.routing is not None for answer in answers],
    ]
    return _typed_arrays(_OF_ANSWERS, columns)


def _typed_arrays(dtypes: Mapping[str, type], columns: Sequence[Sequence[float]]) -> dict[str, Array]:
    return {name: np.array(column, dtypes[name]) for name, column in zip(dtypes, columns, strict=True)}


def _token_arrays(answers: Sequence[Answer]) -> dict[str, Array]:
    columns = zip(*map(_answer_tokens, answers), strict=True)
    return {name: np.concatenate(column) for name, column in zip(_OF_TOKENS, columns, strict=True)}


# --- back to groups ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _GroupReader:
    """Reads the arrays of one checkpoint, each of which has to be as long as the counts before it say."""

    arrays: Mapping[str, Array]
    read_prompt: Callable[[int, DocumentKey], NumberedPrompt]
    now: float
    _read_names: set[str] = field(default_factory=set)

    def read_groups(self) -> list[FinishedGroup]:
        labels = self._read_labels()
        groups = self._read_columns(_OF_GROUPS, len(self.arrays.get("group.number", ())), "groups")
        _require_distinct(groups["group.number"].tolist(), "finished groups")
        prompts = self._read_prompts(groups)
        answers = self._read_answers(labels, self._sum_counts(groups, "group.answers"))
        prompt_of_answers = [
            prompt for prompt, count in zip(prompts, groups["group.answers"], strict=True) for _ in range(count)
        ]
        scored_answers = [*self._scored_answers(labels, answers, prompt_of_answers)]
        if unknown_names := self.arrays.keys() - self._read_names:
            raise _unusable_error(
                f"it has finished groups with {', '.join(sorted(unknown_names))}, unknown to this version"
            )
        return [
            FinishedGroup(AnswerGroup(prompt, tuple(scored_answers[part])), int(version))
            for prompt, version, part in zip(
                prompts, groups["group.version"], _count_slices(groups["group.answers"]), strict=True
            )
        ]

    def _read_labels(self) -> _Labels:
        content = self._read_array(_LABELS, np.uint8, None, "bytes").tobytes()
        try:
            # Not pydantic's parser, which knows no halves of surrogate pairs.
            labels = _labels.validate_python(json.loads(content), strict=False)
        except ValueError as error:
            raise _unusable_error(f"the labels of its finished groups cannot be read: {error}") from error
        if labels.format != FORMAT:
            raise _unusable_error(
                f"its finished groups have the format {labels.format}, and this version reads {FORMAT}"
            )
        return labels

    def _read_prompts(self, groups: Mapping[str, Array]) -> list[NumberedPrompt]:
        tokens = self._read_array(_PROMPT_TOKENS, np.int32, self._sum_counts(groups, "group.promptTokens"), "prompts")
        keys = [groups[name].tolist() for name in ("group.number", "group.source", "group.document")]
        prompts = [
            self.read_prompt(number, DocumentKey(source, document))
            for number, source, document in zip(*keys, strict=True)
        ]
        for prompt, part in zip(prompts, _count_slices(groups["group.promptTokens"]), strict=True):
            if tuple(tokens[part].tolist()) != prompt.prompt.tokens:
                raise BadData(
                    f"prompt {prompt.number} ({prompt.prompt.place}) has other tokens than when it was answered: "
                    f"{len(prompt.prompt.tokens)} tokens, and {part.stop - part.start} in the checkpoint; put the data "
                    "and the tokenizer back, or start a new job with checkpoint.resumeFrom, which takes the weights "
                    "alone"
                )
        return prompts

    def _read_answers(self, labels: _Labels, count: int) -> Mapping[str, Array]:
        answers = self._read_columns(_OF_ANSWERS, count, "answers")
        for name, choices in (
            ("answer.finishReason", len(labels.finish_reasons)),
            ("answer.rewardNames", len(labels.reward_names)),
            ("answer.hasRouting", 2),
        ):
            if count and not 0 <= answers[name].min() <= answers[name].max() < choices:
                raise _unusable_error(
                    f"{name} of its finished groups is {answers[name].min()} to {answers[name].max()}, and has to be "
                    f"below {choices}"
                )
        return answers

    def _scored_answers(
        self, labels: _Labels, answers: Mapping[str, Array], prompts: Sequence[NumberedPrompt]
    ) -> Iterator[ScoredAnswer]:
        tokens = self._read_columns(_OF_TOKENS, self._sum_counts(answers, "answer.tokens"), "tokens")
        texts = self._read_array(_TEXTS, np.uint8, self._sum_counts(answers, "answer.textBytes"), "texts").tobytes()
        names = [labels.reward_names[place] for place in answers["answer.rewardNames"]]
        part_counts = np.array([*map(len, names)], np.int64)
        scores = self._read_array(_PARTS, np.float64, int(part_counts.sum()), "scores").tolist()
        columns = {name: values.tolist() for name, values in answers.items()}
        places = zip(
            *(_count_slices(counts) for counts in (answers["answer.tokens"], answers["answer.textBytes"], part_counts)),
            strict=True,
        )
        for number, (prompt, (token_part, text_part, score_part)) in enumerate(zip(prompts, places, strict=True)):
            row = {name: column[number] for name, column in columns.items()}
            ids, log_probabilities, versions = (tokens[name][token_part] for name in _OF_TOKENS)
            answer = Answer(
                _answer_request(prompt, row),
                *(ids, log_probabilities, versions),
                labels.finish_reasons[row["answer.finishReason"]],
                self._read_routing(number, prompt, len(ids)) if row["answer.hasRouting"] else None,
            )
            parts = dict(zip(names[number], scores[score_part], strict=True))
            score = CompletionScore(row["answer.total"], parts)
            text = _decode_text(texts[text_part], prompt)
            yield ScoredAnswer(answer, text, score, row["answer.reward"], self.now)

    def _read_routing(self, number: int, prompt: NumberedPrompt, answer_tokens: int) -> Array:
        name, prompt_tokens = f"routing.{number}", len(prompt.prompt.tokens)
        routing = self.arrays.get(name)
        if routing is None or not _is_routing(routing, prompt_tokens, answer_tokens):
            stored = "absent" if routing is None else f"{routing.dtype} {list(routing.shape)}"
            raise _unusable_error(
                f"the experts of an answer of {answer_tokens} tokens to prompt {prompt.number} of {prompt_tokens} "
                f"({name} of its finished groups) are {stored}, and have to be integers for "
                f"{prompt_tokens + answer_tokens - 1} tokens, layers and places"
            )
        self._read_names.add(name)
        return routing

    def _read_columns(self, dtypes: Mapping[str, type], count: int, counted: str) -> dict[str, Array]:
        return {name: self._read_array(name, dtype, count, counted) for name, dtype in dtypes.items()}

    def _read_array(self, name: str, dtype: type, count: int | None, counted: str) -> Array:
        array = self.arrays.get(name)
        if array is None:
            raise _unusable_error(f"its finished groups have no {name}")
        if array.dtype != dtype or array.ndim != 1 or (count is not None and len(array) != count):
            expected = f"{np.dtype(dtype)} [{counted if count is None else count}]"
            raise _unusable_error(
                f"{name} of its finished groups is {array.dtype} {list(array.shape)}, and has to be {expected}, for "
                f"{counted}"
            )
        self._read_names.add(name)
        return array

    def _sum_counts(self, columns: Mapping[str, Array], name: str) -> int:
        counts = columns[name]
        if len(counts) and counts.min() < 0:
            raise _unusable_error(f"{name} of its finished groups is {counts.min()}, and counts from 0")
        return int(counts.sum())


def _answer_request(prompt: NumberedPrompt, row: Mapping[str, Any]) -> GenerationRequest:
    tokens = np.asarray(prompt.prompt.tokens, np.int32)
    return GenerationRequest(prompt.number, row["answer.member"], tokens, row["answer.seed"])


def _decode_text(content: bytes, prompt: NumberedPrompt) -> str:
    try:
        return content.decode(*_ENCODING)
    except UnicodeDecodeError as error:
        raise _unusable_error(f"the text of an answer to prompt {prompt.number} is no UTF-8: {error}") from error


def _count_slices(counts: Array) -> list[slice]:
    """Return where the elements of each count lie: counts 2 1 are elements 0 to 2, then 2 to 3."""
    ends = np.concatenate([[0], np.cumsum(counts)]).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


def _require_distinct(numbers: Sequence[int], named: str) -> None:
    if repeated := sorted(number for number, count in Counter(numbers).items() if count > 1):
        raise _unusable_error(f"its {named} have prompt {', '.join(map(str, repeated))} more than once")


def _unusable_error(problem: str) -> BadConfiguration:
    return BadConfiguration(f"the checkpoint cannot be resumed: {problem}; {OTHER_CHECKPOINT}")
