"""Messages of a core with packed log-probabilities, beside vLLM's own. test_engine.py has those of a real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from moejob_rollout.packed_log_probabilities import pack_batch
from moejob_rollout.plugin import register

register()


def output(number: int, tokens: int = 1, width: int = 1, *, has_logprobs: bool = True) -> EngineCoreOutput:
    """Return what vLLM sends of one answer after one step."""
    random = np.random.default_rng(number)
    logprobs = LogprobsLists(
        random.integers(0, 1000, (tokens, width), np.int32),
        random.standard_normal((tokens, width), np.float32),
        random.integers(0, 1000, tokens, np.int32),
    )
    return EngineCoreOutput(
        request_id=f"answer-{number}",
        new_token_ids=[number] * tokens,
        new_logprobs=logprobs if has_logprobs else None,
        finish_reason=FinishReason.STOP if number % 3 == 0 else None,
    )


def sent(outputs: list[EngineCoreOutput]) -> EngineCoreOutputs:
    """Return the message that arrives."""
    message = EngineCoreOutputs(outputs=outputs, weight_version="7")
    # As it travels: frames of bytes.
    frames = [bytes(frame) for frame in MsgpackEncoder().encode_into(message, bytearray())]
    arrived: EngineCoreOutputs = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    return arrived


def contents(outputs: Sequence[EngineCoreOutput]) -> list[Any]:
    """Return all that is known of outputs; rows of no token are no rows."""
    return [
        (
            one.request_id,
            one.new_token_ids,
            one.finish_reason,
            None
            if one.new_logprobs is None or not len(one.new_logprobs.logprobs)
            else [(column.dtype.str, column.tolist()) for column in one.new_logprobs[:3]],
        )
        for one in outputs
    ]


STEPS: dict[str, Callable[[], list[EngineCoreOutput]]] = {
    "nothing": list,
    "one answer": lambda: [output(1)],
    "many answers": lambda: [output(number) for number in range(600)],
    "some without log-probabilities": lambda: [output(number, has_logprobs=number % 2 == 1) for number in range(9)],
    "none with log-probabilities": lambda: [output(number, has_logprobs=False) for number in range(3)],
    "several tokens at once": lambda: [output(number, number % 4) for number in range(9)],
    "the choices beside each token": lambda: [output(number, width=6) for number in range(9)],
    "rows of several widths": lambda: [output(number, width=1 + number % 2) for number in range(9)],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_each_answer_arrives_with_its_own_log_probabilities(step: Callable[[], list[EngineCoreOutput]]) -> None:
    arrived = sent(step())
    assert contents(arrived.outputs) == contents(step())
    assert arrived.weight_version == "7"


def test_answers_travel_as_one_batch() -> None:
    outputs = STEPS["many answers"]()
    pack_batch(outputs)
    assert [one.request_id for one in outputs if one.new_logprobs is not None] == ["answer-0"]
