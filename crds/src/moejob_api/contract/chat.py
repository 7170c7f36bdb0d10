"""The conversation with a model, as `moejob chat` holds it with the program that has the model: a line each, in JSON.

The program writes a line when the model is loaded, then for each request pieces of the answer and a last line. No
models: the command line starts at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from moejob_api import api_bodies

# Programs that hold a conversation: of the trainer's environment by Transformers, of the engines' by vLLM.
TRANSFORMERS_MODULE = "moejob_trainer.chat"
VLLM_MODULE = "moejob_rollout.chat"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The conversation so far, and the sampling of the answer; temperature 0 takes the likeliest token each time."""

    messages: tuple[ChatMessage, ...]
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A piece of an answer, or its end; `is_cut`: it had too many tokens; `problem`: why there is no answer."""

    text: str = ""
    is_last: bool = False
    is_cut: bool = False
    problem: str = ""


def request_line(request: ChatRequest) -> str:
    """Return the line of a request."""
    return json.dumps(asdict(request)) + "\n"


def parse_request(line: str) -> ChatRequest:
    """Read the line of a request."""
    body = json.loads(line)
    return ChatRequest(
        tuple(ChatMessage(message["role"], message["content"]) for message in body["messages"]),
        body["max_tokens"],
        body["temperature"],
    )


def reply_line(reply: ChatReply) -> str:
    """Return the line of a reply."""
    return json.dumps(asdict(reply)) + "\n"


def parse_reply(line: str) -> ChatReply | None:
    """Read the line of a reply; None when it is none."""
    try:
        body = api_bodies.as_mapping(json.loads(line))
    except ValueError:
        return None
    # Line ends are part of an answer; what a terminal would obey is escaped where it is printed.
    text, problem = (value if isinstance(value, str) else "" for value in map(body.get, ("text", "problem")))
    return ChatReply(text, body.get("is_last") is True, body.get("is_cut") is True, problem)


def token_limit(prompt_tokens: int, max_tokens: int, positions: int | None) -> int:
    """Return how many tokens an answer may have; ValueError where the conversation fills the model's positions."""
    if positions is None or prompt_tokens + max_tokens <= positions:
        return max_tokens
    if prompt_tokens >= positions:
        raise ValueError(
            f"the conversation has {prompt_tokens} tokens, and the model reads {positions}; begin another one"
        )
    return positions - prompt_tokens
