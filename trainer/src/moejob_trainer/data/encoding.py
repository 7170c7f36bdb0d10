"""A record of each format as token ids, with the tokens that are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from moejob_api.job.model import DataFormat, Dataset, TrainedTurns
from moejob_trainer.data.chat_template import Rendered, Span, Template
from moejob_trainer.data.conversations import conversation, text
from moejob_trainer.data.records import Record
from moejob_trainer.errors import BadData


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Token ids and which of them are trained on."""

    tokens: npt.NDArray[np.int32]  # [length]
    trained: npt.NDArray[np.bool_]  # [length]; never the first, which nothing predicts

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained on."""
        return int(np.count_nonzero(self.trained))


Encoder = Callable[[Record], Sample]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class RecordKind:
    """The format of records, and the turns of them that are trained on."""

    format: DataFormat
    turns: TrainedTurns = TrainedTurns.ALL

    @classmethod
    def of(cls, dataset: Dataset) -> RecordKind:
        """The kind of a data set's records."""
        return cls(dataset.format, dataset.trained_turns)


def encoder(kind: RecordKind, tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> Encoder:
    """Return the function that turns records of a kind into samples."""
    match kind.format:
        case DataFormat.CHAT:
            template = Template(tokenizer, chat_template, kind.turns)
            return lambda record: _chat(record, tokenizer, template)
        case DataFormat.PROMPT_COMPLETION:
            return lambda record: _completion(record, tokenizer)
        case DataFormat.TEXT:
            return lambda record: _whole(record, tokenizer)
        case DataFormat.PROMPTS:
            raise BadData("data of format Prompts has nothing to train on; it is for method GRPO")
        case _:
            assert_never(kind.format)


def ids(tokenizer: PreTrainedTokenizerBase, written: str) -> list[int]:
    """The tokens of a text and nothing around them."""
    found: list[int] = tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that begins every text, for tokenizers that have one and put it there themselves."""
    first: list[int] = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _chat(record: Record, tokenizer: PreTrainedTokenizerBase, template: Template) -> Sample:
    rendered = template.rendered(conversation(record))
    if tokenizer.is_fast:
        return _by_offsets(record, tokenizer, rendered)
    return _by_pieces(record, tokenizer, rendered)


def _by_offsets(record: Record, tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> Sample:
    found = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return _sample(record, found["input_ids"], _in_spans(found["offset_mapping"], rendered.spans))


def _in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return the tokens that have a character in one of the spans, which are in order and apart."""
    first, last = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    # Byte-level tokenizers leave blanks out of offsets, and give every byte of a character the same ones.
    ends = np.maximum.accumulate(last)
    starts = np.minimum(first, np.concatenate([[0], ends[:-1]]))
    # The span that each token could be in: the first that does not end before it.
    opened, closed = np.array([*spans, (_NEVER, _NEVER)], dtype=np.int64).T
    inside: npt.NDArray[np.bool_] = opened[np.searchsorted(closed, starts, side="right")] < ends
    return inside


def _by_pieces(record: Record, tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> Sample:
    """Encode with a tokenizer that does not report the characters of a token."""
    tokens, trained = list[int](), list[bool]()
    for piece, is_trained in _pieces(rendered):
        found = ids(tokenizer, piece)
        tokens += found
        trained += [is_trained] * len(found)
    if tokens != ids(tokenizer, rendered.text):
        raise BadData(
            f"{record.place}: the tokenizer joins what the assistant says with what stands around it, and does not say "
            "which characters a token stands for, so what to train on is unknown; use a fast tokenizer "
            "(tokenizer.json), or a chat template that sets special tokens around what the assistant says"
        )
    return _sample(record, tokens, trained)


def _pieces(rendered: Rendered) -> Iterator[tuple[str, bool]]:
    done = 0
    for start, end in rendered.spans:
        yield rendered.text[done:start], False
        yield rendered.text[start:end], True
        done = end
    yield rendered.text[done:], False


def _completion(record: Record, tokenizer: PreTrainedTokenizerBase) -> Sample:
    # Apart, as when the model answers: the prompt is tokenized before the completion exists.
    prompt, completion = text(record, "prompt"), text(record, "completion")
    begin, answer = ids(tokenizer, prompt), ids(tokenizer, completion)
    if tokenizer.decode(begin + answer) != tokenizer.decode(ids(tokenizer, prompt + completion)):
        raise BadData(
            f"{record.place}: the tokenizer writes prompt and completion differently together and apart (it adds or "
            "drops blanks between them); use the format Chat"
        )
    front = opening(tokenizer) + begin
    answer.append(end_of_text(tokenizer))
    return _sample(record, front + answer, [False] * len(front) + [True] * len(answer))


def _whole(record: Record, tokenizer: PreTrainedTokenizerBase) -> Sample:
    tokens = [*opening(tokenizer), *ids(tokenizer, text(record, "text")), end_of_text(tokenizer)]
    return _sample(record, tokens, [True] * len(tokens))


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends a text."""
    if not isinstance(tokenizer.eos_token_id, int):
        raise BadData("the tokenizer has no eos_token, so a model trained with it would never stop; set one")
    return tokenizer.eos_token_id


def _sample(record: Record, tokens: Sequence[int], trained: Sequence[bool] | npt.NDArray[np.bool_]) -> Sample:
    mask = np.array(trained, dtype=np.bool_)
    mask[:1] = False
    if not mask.any():
        raise BadData(f"{record.place} has {len(tokens)} tokens and none of them to train on")
    return Sample(np.array(tokens, dtype=np.int32), mask)
