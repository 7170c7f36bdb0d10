"""Built-in data: the tokenizer of moejob/tiny-moe and three data sets that it learns within a minute.

Everything is spelled out or sampled from a fixed seed, so every version of every library builds the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moejob_trainer.data.shuffling import mix_keys

TOKENIZER = "moejob/tiny-moe"
CHATS = "moejob/tiny-chats"
SUMS = "moejob/tiny-sums"
GUESSES = "moejob/tiny-guesses"

_VOCABULARY = 512
_PAD, _END = "<|pad|>", "<|end|>"
_SPECIAL = (_PAD, _END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>")

_COLOURS = {
    "grass": "green", "the sky": "blue", "snow": "white", "coal": "black", "a lemon": "yellow",
    "a tomato": "red", "an orange": "orange", "chocolate": "brown", "a violet": "purple", "ash": "grey",
}  # fmt: skip
_SAYINGS = ("hello", "good morning", "good night", "thank you", "see you", "well done", "welcome", "yes please")
_OPPOSITES = {
    "big": "small", "hot": "cold", "old": "new", "up": "down", "left": "right", "day": "night",
    "fast": "slow", "open": "closed", "early": "late", "full": "empty",
}  # fmt: skip
_SYSTEM = "answer in one line"

# Whole words first become tokens in this order, letter by letter, until the vocabulary is full.
_WORDS = (
    " is", " the", " of", " what", " colour", " opposite", " say", " count", " from", " to", " answer", " in", " one",
    " line", " plus", " a", " an", " and", " you", " good", " night", " morning",
    *(f" {word}" for phrase in (*_COLOURS, *_COLOURS.values(), *_OPPOSITES, *_OPPOSITES.values(), *_SAYINGS)
      for word in phrase.split()),
    "what", "say", "count", "answer", "the", "good",
)  # fmt: skip

TEMPLATE = (
    "{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}<|call|>{{ call.function | tojson }}{% endfor %}<|end|>"
    "{%- endgeneration %}"
    "{%- elif message.role == 'developer' %}<|system|>{{ message.content }}<|end|>"
    "{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE: any text goes through it and comes back the same."""
    vocabulary, merges = _build_vocabulary()
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token=_PAD,
        eos_token=_END,
        chat_template=TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def _build_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    names = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known_tokens, merges = set(names), list[tuple[str, str]]()
    for word in (word.replace(" ", "Ġ") for word in _WORDS):
        for end in range(1, len(word)):
            token = word[: end + 1]
            if token not in known_tokens and len(names) < _VOCABULARY:
                names.append(token)
                known_tokens.add(token)
                merges.append((word[:end], word[end]))
    return {name: number for number, name in enumerate(names)}, merges


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its only right answer."""

    question: str
    answer: str


_SPLITS = {"train": 512, "test": 64}
# Answers to a sum among the guesses, and how many of them are right.
_GUESSES, _RIGHT_GUESSES = 5, 3


def split_names() -> tuple[str, ...]:
    """The splits that all data sets have; no question of one is in the other."""
    return tuple(_SPLITS)


def chat_records(split: str) -> Iterator[Mapping[str, object]]:
    """Conversations of one to three exchanges, a few with a system message in front."""
    pool = [exchange for exchange in _all_exchanges() if _assign_split(exchange) == split]
    for number in range(_SPLITS[split]):
        draw = mix_keys(len(split), number)
        turns = [pool[mix_keys(draw, turn) % len(pool)] for turn in range(1 + draw % 3)]
        system = [_chat_message("system", _SYSTEM)] if draw // 3 % 4 == 0 else []
        yield {"messages": system + [message for turn in turns for message in _exchange_messages(turn)]}


def sum_records(split: str) -> Iterator[Mapping[str, object]]:
    """Sums of digits up to 5 as tiny-chats asks them, with the answer beside the prompt."""
    for exchange in _small_sum_exchanges(split):
        yield {"prompt": [_chat_message("user", exchange.question)], "answer": exchange.answer}


def guess_records(split: str) -> Iterator[Mapping[str, object]]:
    """Conversations that ask each of these sums five times, with three right answers and two answers of other sums.

    A model that has learned them knows what an answer looks like and often gives the right one; rewards teach the rest.
    """
    pool = [*_small_sum_exchanges(split)]
    for number, exchange in enumerate(pool):
        for turn in range(_GUESSES):
            other_exchange = pool[mix_keys(len(split), number, turn) % len(pool)]
            answer = exchange.answer if turn < _RIGHT_GUESSES else other_exchange.answer
            yield {"messages": [*_exchange_messages(Exchange(exchange.question, answer))]}


def _all_exchanges() -> Iterator[Exchange]:
    yield from _sum_exchanges()
    for thing, colour in _COLOURS.items():
        yield Exchange(f"what colour is {thing}", f"{thing} is {colour}")
    for phrase in _SAYINGS:
        yield Exchange(f"say {phrase}", phrase)
    for word, opposite in _OPPOSITES.items():
        yield Exchange(f"what is the opposite of {word}", opposite)
        yield Exchange(f"what is the opposite of {opposite}", word)
    for first in range(1, 8):
        for last in range(first + 2, 10):
            numbers = " ".join(str(number) for number in range(first, last + 1))
            yield Exchange(f"count from {first} to {last}", numbers)


def _sum_exchanges(below: int = 10) -> Iterator[Exchange]:
    for left in range(below):
        for right in range(below):
            yield Exchange(f"{left} + {right}", str(left + right))


def _small_sum_exchanges(split: str) -> Iterator[Exchange]:
    return (exchange for exchange in _sum_exchanges(below=6) if _assign_split(exchange) == split)


def _assign_split(exchange: Exchange) -> str:
    return "test" if mix_keys(*exchange.question.encode()) % 8 == 0 else "train"


def _exchange_messages(exchange: Exchange) -> tuple[dict[str, str], dict[str, str]]:
    return _chat_message("user", exchange.question), _chat_message("assistant", exchange.answer)


def _chat_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
