"""`python -m moejob_rollout.chat MODEL`, which `moejob chat` starts where there is a GPU: a model folder, run by vLLM.

Requests come on standard input and replies go to standard output, a line each; what vLLM prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO
from uuid import uuid4

from moejob_api.contract.chat import ChatReply, ChatRequest, parse_request, reply_line, token_limit
from moejob_api.contract.pods import ExitCode

_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_PLUGINS": "moejob", "VLLM_LOGGING_LEVEL": "ERROR"}
# torch.compile would need a compiler of C++ at run time.
_ON_CPU = {"TORCHDYNAMO_DISABLE": "1"}
_CPU_CACHE_BYTES = 256 * 1024 * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Load a model and answer requests until there are no more."""
    [folder] = sys.argv[1:] if arguments is None else arguments
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name, value in (_QUIET | ({} if has_gpu() else _ON_CPU)).items():
        os.environ.setdefault(name, value)
    asyncio.run(serve_requests(folder, replies))
    return ExitCode.DONE


def has_gpu() -> bool:
    """Return whether a GPU of NVIDIA can be opened."""
    return os.path.exists("/dev/nvidia0")  # noqa: PTH110


async def serve_requests(folder: str, replies: TextIO) -> None:
    """Start an engine of this process, and answer each line of standard input."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  # reads the variables that main sets
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415  # as above

    on_cpu: dict[str, Any] = {"kv_cache_memory_bytes": _CPU_CACHE_BYTES, "enable_chunked_prefill": False}
    # One conversation is answered: recording graphs would take longer than it saves.
    settings = AsyncEngineArgs(model=folder, enforce_eager=True, **({} if has_gpu() else on_cpu))
    engine = AsyncLLM.from_engine_args(settings)
    try:
        replies.write(reply_line(ChatReply(is_last=True)))
        while line := await asyncio.to_thread(sys.stdin.readline):
            replies.write(reply_line(await answer_request(engine, parse_request(line), replies)))
    finally:
        engine.shutdown()


async def answer_request(engine: Any, request: ChatRequest, replies: TextIO) -> ChatReply:
    """Write the pieces of an answer, and return the last reply."""
    from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415  # a program that only reads this has no vLLM
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415  # as above

    try:
        tokens = encode_messages(engine.get_tokenizer(), request)
        limit = token_limit(len(tokens), request.max_tokens, engine.model_config.max_model_len)
    except Exception as error:  # noqa: BLE001  # a template is a foreign program, which may raise anything
        return ChatReply(is_last=True, problem=str(error))
    sampling = SamplingParams(temperature=request.temperature, max_tokens=limit, output_kind=RequestOutputKind.DELTA)
    reason = None
    async for output in engine.generate(TokensPrompt(prompt_token_ids=tokens), sampling, f"chat-{uuid4()}"):
        piece = output.outputs[0]
        reason = piece.finish_reason
        if piece.text:
            replies.write(reply_line(ChatReply(piece.text)))
    return ChatReply(is_last=True, is_cut=reason == "length")


def encode_messages(tokenizer: Any, request: ChatRequest) -> list[int]:
    """Return the tokens of a conversation; a model without a chat template continues its text."""
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message.content for message in request.messages))["input_ids"])
    conversation = [{"role": message.role, "content": message.content} for message in request.messages]
    encoded = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


if __name__ == "__main__":
    sys.exit(main())
