"""A conversation as the text that the model reads, and the characters of it that the assistant wrote.

A template marks these with {% generation %}; some published templates without marks have a marked copy here. For other
templates the text before and after every assistant message is compared. A template for which the comparison fails is
refused: no conversation is trained on without a mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from moejob_api.job.model import TrainedTurns
from moejob_trainer.data.bounded_rendering import bounded_work, refuse_excess, refuse_powers
from moejob_trainer.data.conversations import Conversation, Message
from moejob_trainer.data.generation_templates import KNOWN, find_marked_template, hash_template
from moejob_trainer.data.records import refuse_surrogates
from moejob_trainer.errors import BadData

Span = tuple[int, int]

# Its types claim that it returns one text; it returns texts and, for each, spans.
_render_jinja: Callable[..., tuple[list[str], list[list[Span]]]] = render_jinja_template  # type: ignore[assignment]

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_FIX = (
    "give data.chatTemplate a template that marks what the assistant says with {% generation %} ... {% endgeneration %}"
)


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """The text, and the spans of characters that are trained on, in order."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """The chat template of a tokenizer, or the one that the job gives instead."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, override: str | None, turns: TrainedTurns = TrainedTurns.ALL
    ) -> None:
        if override is None and not tokenizer.chat_template:
            raise BadData("the tokenizer has no chat template; give one as data.chatTemplate, or use another format")
        self._tokenizer = tokenizer
        self._override = override
        self._turns = turns

    def render_conversation(self, conversation: Conversation) -> RenderedConversation:
        """The conversation with the spans of its assistant messages."""
        if not conversation.assistant_indexes:
            raise BadData(f"{conversation.place} has no assistant message, so there is nothing to train on")
        trained_indexes = conversation.trained_indexes(self._turns)
        if not trained_indexes:
            raise BadData(
                f"{conversation.place} has no assistant message that is trained on: trainedTurns is {self._turns}, and "
                "a message of weight 0 is not"
            )
        text, marked_spans = self._render_messages(conversation, conversation.messages, mark=True)
        _refuse_omissions(conversation, text)
        if self.has_markers(conversation):
            spans = _choose_spans(conversation, marked_spans, trained_indexes)
        else:
            spans = tuple(self._compare_renderings(conversation, text, trained_indexes))
        nonempty_spans = tuple(sorted((start, end) for start, end in spans if start < end))
        if not nonempty_spans:
            raise BadData(f"{conversation.place}: the chat template marks nothing as the assistant's; {_FIX}")
        return RenderedConversation(text, nonempty_spans)

    def render_prompt(self, conversation: Conversation) -> str:
        """The conversation up to where the assistant begins to answer."""
        text = self._render_text(conversation, conversation.messages, prompt=True)
        _refuse_omissions(conversation, text)
        return text

    def has_markers(self, conversation: Conversation) -> bool:
        """Return whether the template itself marks the assistant's text."""
        return _MARKER.search(self._marked_source(conversation)) is not None

    def _compare_renderings(
        self, conversation: Conversation, text: str, trained_indexes: Sequence[int]
    ) -> Iterator[Span]:
        messages = conversation.messages
        for number in trained_indexes:
            text_before = self._render_text(conversation, messages[:number], prompt=True)
            text_after = self._render_text(conversation, messages[: number + 1])
            if not (text_after.startswith(text_before) and text.startswith(text_after)):
                raise BadData(
                    f"{conversation.place}, message {number + 1}: the chat template writes this assistant message "
                    "differently when it is answered and when other messages follow, so what to train on is "
                    f"unknown; {self._unknown_template_note(conversation)}; {_FIX}"
                )
            # The model never writes a line break behind the end of its turn: it has stopped by then.
            message_text = text_after[len(text_before) :].rstrip()
            if not message_text.endswith(tuple(self._tokenizer.get_added_vocab())):
                # Some models stop where the next turn begins, so their own turn ends without a token to learn.
                raise BadData(
                    f"{conversation.place}, message {number + 1}: under the chat template this message ends without a "
                    "special token, so the model would not learn to stop; "
                    f"{self._unknown_template_note(conversation)}; {_FIX}, "
                    "that token included"
                )
            yield len(text_before), len(text_before) + len(message_text)

    def _unknown_template_note(self, conversation: Conversation) -> str:
        known_by = hash_template(self._marked_source(conversation))[:12]
        return f"this template (SHA-256 {known_by}...) is none of {KNOWN}, which moejob knows how to mark"

    def _render_text(self, conversation: Conversation, messages: Sequence[Message], prompt: bool = False) -> str:
        return self._render_messages(conversation, messages, prompt=prompt)[0]

    def _render_messages(
        self, conversation: Conversation, messages: Sequence[Message], prompt: bool = False, mark: bool = False
    ) -> tuple[str, tuple[Span, ...]]:
        source = self._marked_source(conversation)
        try:
            with bounded_work():
                refuse_powers(source)
                texts, spans = _render_jinja(
                    conversations=[list(messages)],
                    tools=list(conversation.tools) or None,
                    chat_template=source,
                    return_assistant_tokens_mask=mark and _MARKER.search(source) is not None,
                    add_generation_prompt=prompt,
                    **self._tokenizer.special_tokens_map,
                )
            refuse_excess(texts[0], conversation.character_count)
        # A template is a foreign program: it refuses with TemplateError and fails with the others.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise BadData(f"{conversation.place}: the chat template fails: {error}") from error
        refuse_surrogates(texts[0], f"{conversation.place}, as the chat template writes it,")
        return texts[0], tuple(spans[0]) if spans else ()

    def _marked_source(self, conversation: Conversation) -> str:
        source = self._template_source(conversation)
        return find_marked_template(source) or source

    def _template_source(self, conversation: Conversation) -> str:
        if self._override is not None:
            return self._override
        # A tokenizer can have several templates, one of them for tools.
        source: str = self._tokenizer.get_chat_template(None, list(conversation.tools) or None)  # type: ignore[arg-type]
        return source


def _choose_spans(
    conversation: Conversation, marked_spans: Sequence[Span], trained_indexes: Sequence[int]
) -> tuple[Span, ...]:
    """Return the marked spans of these messages."""
    assistant_indexes = conversation.assistant_indexes
    if len(trained_indexes) == len(assistant_indexes):
        return tuple(marked_spans)
    if len(marked_spans) != len(assistant_indexes):
        raise BadData(
            f"{conversation.place}: the chat template marks {len(marked_spans)} spans for {len(assistant_indexes)} "
            "assistant messages, so which of them is one that is not trained on is unknown; give data.chatTemplate a "
            "template that has {% generation %} once for each"
        )
    return tuple(
        span for number, span in zip(assistant_indexes, marked_spans, strict=True) if number in trained_indexes
    )


def _refuse_omissions(conversation: Conversation, text: str) -> None:
    """Refuse a text that lacks parts of its record: templates silently drop tools, roles, text beside tool calls."""
    for description, required_text in _required_texts(conversation):
        # Some write a tool's answer as JSON.
        if required_text not in text and json.dumps(required_text, ensure_ascii=False)[1:-1] not in text:
            raise BadData(
                f"{conversation.place}: the chat template leaves out {description}; change the record, or give a "
                "template that knows it as data.chatTemplate"
            )


def _required_texts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    for tool in conversation.tools:
        name = tool.get("function", tool).get("name")
        yield f"the tool {name}", str(name)
    for number, message in enumerate(conversation.messages, start=1):
        for call in message.get("tool_calls", ()):
            yield f"the tool call of message {number}", call["function"]["name"]
        if isinstance(message["content"], str):
            thought, spoken = _split_thought(message)
            yield f"the content of message {number} (role {message['role']})", spoken.strip()
            # Earlier thoughts may go: many templates keep none but the last.
            if number == len(conversation.messages):
                yield f"the thoughts of message {number}", thought.strip()


def _split_thought(message: Message) -> tuple[str, str]:
    if message["role"] != "assistant":
        return "", message["content"]
    thought, _, spoken = message["content"].rpartition("</think>")
    apart = next((message[key] for key in ("reasoning_content", "thinking") if isinstance(message.get(key), str)), "")
    return apart or thought.removeprefix("<think>"), spoken
