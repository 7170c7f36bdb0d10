"""`python -m moejob_trainer.chat MODEL`, which `moejob chat` starts: a model folder, read and run by Transformers.

Requests come on standard input and replies go to standard output, a line each; what libraries print goes to standard
error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging
from transformers.generation.streamers import TextStreamer

from moejob_api.contract.chat import ChatMessage, ChatReply, ChatRequest, parse_request, reply_line, token_limit
from moejob_api.contract.pods import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Load a model and answer requests until there are no more."""
    [folder] = sys.argv[1:] if arguments is None else arguments
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        model = load_model(Path(folder))
    except (OSError, ValueError) as error:
        print(f"{folder} cannot be loaded: {error}", file=sys.stderr)  # noqa: T201
        return ExitCode.BAD_CONFIGURATION
    replies.write(reply_line(ChatReply(is_last=True)))
    for line in sys.stdin:
        replies.write(reply_line(answer_request(model, parse_request(line), replies)))
    return ExitCode.DONE


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer; their classes are named by the folder, which no type checker can know."""

    tokenizer: Any
    model: Any

    @property
    def most_positions(self) -> int | None:
        """Positions that the model has; None where its configuration names none."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) else None


def load_model(folder: Path) -> LoadedModel:
    """Load a model in the type of its files, on a GPU where there is one."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return LoadedModel(tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu").eval())


def answer_request(loaded: LoadedModel, request: ChatRequest, replies: TextIO) -> ChatReply:
    """Write the pieces of an answer, and return the last reply."""
    tokenizer, model = loaded.tokenizer, loaded.model
    try:
        inputs = encode_messages(tokenizer, request.messages).to(model.device)
        prompt_tokens = inputs["input_ids"].shape[1]
        limit = token_limit(prompt_tokens, request.max_tokens, loaded.most_positions)
    except Exception as error:  # noqa: BLE001  # a template is a foreign program, which may raise anything
        return ChatReply(is_last=True, problem=str(error))
    sampling = {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
    with torch.inference_mode():
        generated = model.generate(
            **inputs, **sampling, max_new_tokens=limit, streamer=PieceStreamer(tokenizer, replies)
        )
    answer = generated[0, prompt_tokens:]
    is_cut = len(answer) >= limit and int(answer[-1]) not in end_tokens(model)
    return ChatReply(is_last=True, is_cut=is_cut)


def encode_messages(tokenizer: Any, messages: Sequence[ChatMessage]) -> Any:
    """Return the tokens of a conversation; a model without a chat template continues its text."""
    if tokenizer.chat_template is None:
        return tokenizer("\n".join(message.content for message in messages), return_tensors="pt")
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    return tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def end_tokens(model: Any) -> list[int]:
    """Return the tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


class PieceStreamer(TextStreamer):
    """Writes text as soon as no further token can change it."""

    def __init__(self, tokenizer: Any, replies: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._replies = replies

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write a piece of the answer."""
        del stream_end
        if text:
            self._replies.write(reply_line(ChatReply(text)))


if __name__ == "__main__":
    sys.exit(main())
