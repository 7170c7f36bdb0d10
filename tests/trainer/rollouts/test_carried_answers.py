"""Parts of answers, the requests that continue them, and the whole that both make."""

from __future__ import annotations

import numpy as np
import pytest

from moejob_trainer.rollouts.carried_answers import AnswerSegment, complete_answer, continue_request, join_segments
from moejob_trainer.rollouts.interface import FinishReason, GenerationRequest, SamplingParams

REQUEST = GenerationRequest(4, 2, np.array([11, 12, 13], np.int32), seed=77)
SAMPLING = SamplingParams(temperature=0.7, top_p=1.0, max_new_tokens=8, stop_tokens=(1,))


def segment(
    tokens: list[int], version: int, finish_reason: FinishReason | None = None, before: int = 3
) -> AnswerSegment:
    """Tokens behind `before` tokens; all numbers of a token say its version and place."""
    count = len(tokens)
    rows = 10 * version + np.arange(before + count - 1, dtype=np.uint8)
    return AnswerSegment(
        tokens=np.array(tokens, np.int32),
        log_probabilities=np.full(count, -float(version), np.float32),
        versions=np.full(count, version, np.int32),
        finish_reason=finish_reason,
        routing=rows.reshape(-1, 1, 1) if count else None,
    )


def test_without_tokens_the_request_is_the_one_that_was_asked() -> None:
    assert continue_request(REQUEST, SAMPLING, None) == (REQUEST, SAMPLING)


def test_a_continuation_has_read_the_tokens_that_are_there_and_draws_other_numbers() -> None:
    carried = segment([5, 6], 1)
    request, sampling = continue_request(REQUEST, SAMPLING, carried)
    assert request.prompt.tolist() == [11, 12, 13, 5, 6]
    assert (request.group, request.member) == (4, 2)
    assert (sampling.max_new_tokens, sampling.temperature, sampling.stop_tokens) == (6, 0.7, (1,))
    longer, _ = continue_request(REQUEST, SAMPLING, segment([5, 6, 7], 1))
    assert len({REQUEST.seed, request.seed, longer.seed}) == 3
    assert all(0 <= seed < 2**31 for seed in (request.seed, longer.seed))
    again, _ = continue_request(REQUEST, SAMPLING, carried)
    assert again.seed == request.seed


def test_each_token_keeps_the_numbers_of_the_weights_that_chose_it() -> None:
    carried = join_segments(None, segment([5, 6], 1))
    carried = join_segments(carried, segment([7], 2, before=5))
    carried = join_segments(carried, segment([8, 1], 3, FinishReason.STOP, before=6))
    answer = complete_answer(REQUEST, carried)
    assert answer is not None
    assert answer.request is REQUEST
    assert answer.tokens.tolist() == [5, 6, 7, 8, 1]
    assert answer.versions.tolist() == [1, 1, 2, 3, 3]
    assert answer.log_probabilities.tolist() == [-1, -1, -2, -3, -3]
    assert answer.finish_reason is FinishReason.STOP
    # Prompt and first token by the first weights; each last token of a part is read by the next weights.
    assert answer.routing is not None
    assert answer.routing[:, 0, 0].tolist() == [10, 11, 12, 13, 24, 35, 36]


def test_a_part_without_tokens_changes_nothing() -> None:
    empty, carried = segment([], 2), segment([5], 1)
    assert join_segments(None, empty) is None
    assert join_segments(carried, empty) is carried
    assert complete_answer(REQUEST, None) is None


def test_a_part_is_no_answer() -> None:
    assert complete_answer(REQUEST, segment([5, 6], 1)) is None


@pytest.mark.parametrize("count", [1, 7])
def test_as_many_tokens_are_asked_for_as_are_missing(count: int) -> None:
    _, sampling = continue_request(REQUEST, SAMPLING, segment([5] * count, 1))
    assert sampling.max_new_tokens == 8 - count
