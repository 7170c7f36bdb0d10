"""The path of answers: token ids in, token ids with log-probabilities out.

vLLM's own path of this kind makes, checks and writes an object for each token: an answer of 256 tokens takes 2 ms of
the server, and answers that end together wait for each other.
"""

from __future__ import annotations

import asyncio
from array import array
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from moejob_api.contract.answers import AnswerRequest, EngineAnswer, WeightSpan
from moejob_rollout.asgi import Receive, Reply, Scope, Send

# Little-endian where vLLM runs.
_INT32, _FLOAT32 = "i", "f"


class UnanswerableRequest(ValueError):
    """A request that no engine could answer, as one with a prompt that is too long."""


async def answer_request(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request. A client that leaves ends the work for it."""
    reply = Reply(send, keeps_open=True)
    try:
        request = AnswerRequest.model_validate_json(await _read_body(receive))
    except ValidationError as error:
        await reply(HTTPStatus.BAD_REQUEST, f"no request for an answer: {error.errors()[0]['msg']}")
        return
    generating = asyncio.create_task(_generate_answer(scope["app"].state.engine_client, request))
    leaving = asyncio.create_task(_await_disconnect(receive))
    try:
        await asyncio.wait({generating, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if generating.done():
            await reply(HTTPStatus.OK, generating.result().model_dump_json())
    except UnanswerableRequest as error:
        await reply(HTTPStatus.BAD_REQUEST, str(error))
    finally:
        generating.cancel()
        leaving.cancel()


async def _generate_answer(client: Any, request: AnswerRequest) -> EngineAnswer:
    from vllm.exceptions import VLLMValidationError  # noqa: PLC0415  # a program that only reads this has no vLLM

    try:
        return _encode_answer((await _final_output(client, request)).outputs[0])
    except (ValueError, VLLMValidationError) as error:
        raise UnanswerableRequest(str(error)) from error


async def _final_output(client: Any, request: AnswerRequest) -> Any:
    """Return the last output of vLLM, which holds the whole answer, or all that there is when vLLM aborts it."""
    from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415  # as above
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415  # as above

    sampling = SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_tokens,
        seed=request.seed,
        # The trainer decides where an answer ends, not the model's files.
        stop_token_ids=list(request.stop_tokens),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = TokensPrompt(prompt_token_ids=array(_INT32, request.prompt).tolist())
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    last: Any = None
    async for output in client.generate(prompt, sampling, f"answer-{uuid4()}"):
        last = output
    return last


def _encode_answer(output: Any) -> EngineAnswer:
    """Encode an answer of vLLM, which has the log-probability of each chosen token and of no other."""
    from vllm.utils.serial_utils import numpy2base64  # noqa: PLC0415  # as above

    experts = output.routed_experts
    return EngineAnswer(
        tokens=array(_INT32, output.token_ids).tobytes(),
        log_probabilities=array(_FLOAT32, output.logprobs.logprobs).tobytes(),
        spans=tuple(
            WeightSpan(weights=span.version, start=span.start, end=span.end) for span in output.weight_versions or ()
        ),
        finish_reason=output.finish_reason or "",
        routed_experts=None if experts is None else numpy2base64(experts),
    )


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _await_disconnect(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
