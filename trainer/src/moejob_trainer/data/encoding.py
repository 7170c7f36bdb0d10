"""A record of each format as token ids, with the tokens that are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from moejob_api.job.model import DataFormat, Dataset, TrainedTurns
from moejob_trainer.data.chat_template import ChatTemplate, RenderedConversation, Span
from moejob_trainer.data.conversations import read_conversation, require_text
from moejob_trainer.data.records import Record
from moejob_trainer.errors import BadData


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Token ids and which of them are trained on."""

    tokens: npt.NDArray[np.int32]  # [length]
    trained_mask: npt.NDArray[np.bool_]  # [length]; never the first, which nothing predicts

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained on."""
        return int(np.count_nonzero(self.trained_mask))


Encoder = Callable[[Record], Sample]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class RecordKind:
    """The format of records, and the turns of them that are trained on."""

    format: DataFormat
    turns: TrainedTurns = TrainedTurns.ALL

    @classmethod
    def of_dataset(cls, dataset: Dataset) -> RecordKind:
        """The kind of a data set's records."""
        return cls(dataset.format, dataset.trained_turns)


def build_encoder(kind: RecordKind, tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> Encoder:
    """Return the function that turns records of a kind into samples."""
    match kind.format:
        case DataFormat.CHAT:
            template = ChatTemplate(tokenizer, chat_template, kind.turns)
            return lambda record: _encode_chat(record, tokenizer, template)
        case DataFormat.PROMPT_COMPLETION:
            return lambda record: _encode_completion(record, tokenizer)
        case DataFormat.TEXT:
            return lambda record: _encode_document(record, tokenizer)
        case DataFormat.PROMPTS:
            raise BadData("data of format Prompts has nothing to train on; it is for method GRPO")
        case _:
            assert_never(kind.format)


def token_ids(tokenizer: PreTrainedTokenizerBase, content: str) -> list[int]:
    """The tokens of a text and nothing around them."""
    input_ids: list[int] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    return input_ids


def opening_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that begins every text, for tokenizers that have one and put it there themselves."""
    first: list[int] = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _encode_chat(record: Record, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> Sample:
    rendered = template.render_conversation(read_conversation(record))
    if tokenizer.is_fast:
        return _encode_by_offsets(record, tokenizer, rendered)
    return _encode_by_pieces(record, tokenizer, rendered)


def _encode_by_offsets(record: Record, tokenizer: PreTrainedTokenizerBase, rendered: RenderedConversation) -> Sample:
    encoding = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return _build_sample(record, encoding["input_ids"], _tokens_in_spans(encoding["offset_mapping"], rendered.spans))


def _tokens_in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return the tokens that have a character in one of the spans, which are in order and apart."""
    first, last = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    # Byte-level tokenizers leave blanks out of offsets, and give every byte of a character the same ones.
    ends = np.maximum.accumulate(last)
    starts = np.minimum(first, np.concatenate([[0], ends[:-1]]))
    # The span that each token could be in: the first that does not end before it.
    span_starts, span_ends = np.array([*spans, (_NEVER, _NEVER)], dtype=np.int64).T
    inside: npt.NDArray[np.bool_] = span_starts[np.searchsorted(span_ends, starts, side="right")] < ends
    return inside


def _encode_by_pieces(record: Record, tokenizer: PreTrainedTokenizerBase, rendered: RenderedConversation) -> Sample:
    """Encode with a tokenizer that does not report the characters of a token."""
    tokens, trained_mask = list[int](), list[bool]()
    for piece, is_trained in _split_by_spans(rendered):
        piece_ids = token_ids(tokenizer, piece)
        tokens += piece_ids
        trained_mask += [is_trained] * len(piece_ids)
    if tokens != token_ids(tokenizer, rendered.text):
        raise BadData(
            f"{record.place}: the tokenizer joins what the assistant says with what stands around it, and does not say "
            "which characters a token stands for, so what to train on is unknown; use a fast tokenizer "
            "(tokenizer.json), or a chat template that sets special tokens around what the assistant says"
        )
    return _build_sample(record, tokens, trained_mask)


def _split_by_spans(rendered: RenderedConversation) -> Iterator[tuple[str, bool]]:
    position = 0
    for start, end in rendered.spans:
        yield rendered.text[position:start], False
        yield rendered.text[start:end], True
        position = end
    yield rendered.text[position:], False


def _encode_completion(record: Record, tokenizer: PreTrainedTokenizerBase) -> Sample:
    # Apart, as when the model answers: the prompt is tokenized before the completion exists.
    prompt, completion = require_text(record, "prompt"), require_text(record, "completion")
    begin, answer = token_ids(tokenizer, prompt), token_ids(tokenizer, completion)
    if tokenizer.decode(begin + answer) != tokenizer.decode(token_ids(tokenizer, prompt + completion)):
        raise BadData(
            f"{record.place}: the tokenizer writes prompt and completion differently together and apart (it adds or "
            "drops blanks between them); use the format Chat"
        )
    front = opening_tokens(tokenizer) + begin
    answer.append(end_of_text(tokenizer))
    return _build_sample(record, front + answer, [False] * len(front) + [True] * len(answer))


def _encode_document(record: Record, tokenizer: PreTrainedTokenizerBase) -> Sample:
    tokens = [*opening_tokens(tokenizer), *token_ids(tokenizer, require_text(record, "text")), end_of_text(tokenizer)]
    return _build_sample(record, tokens, [True] * len(tokens))


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends a text."""
    if not isinstance(tokenizer.eos_token_id, int):
        raise BadData("the tokenizer has no eos_token, so a model trained with it would never stop; set one")
    return tokenizer.eos_token_id


def _build_sample(record: Record, tokens: Sequence[int], trained: Sequence[bool] | npt.NDArray[np.bool_]) -> Sample:
    mask = np.array(trained, dtype=np.bool_)
    mask[:1] = False
    if not mask.any():
        raise BadData(f"{record.place} has {len(tokens)} tokens and none of them to train on")
    return Sample(np.array(tokens, dtype=np.int32), mask)
