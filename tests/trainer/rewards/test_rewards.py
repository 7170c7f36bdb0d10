"""Rewards score in processes of their own, and a failed one is never a silent zero."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moejob_api.job.grpo import Reward, RewardFailure
from moejob_trainer.rewards.completion import Completion, RewardFailed
from moejob_trainer.rewards.scorer import Score, Scorer
from moejob_trainer.rewards.service import _MOST_ANSWER_BYTES

FOLDER = str(Path(__file__).parent)


def _completion(text: str, answer: str = "7", **fields: object) -> Completion:
    return Completion("3 + 4", text, tokens=len(text), max_new_tokens=10, fields={"answer": answer, **fields})


def _scored(
    rewards: Sequence[Mapping[str, Any]],
    completions: Sequence[Completion],
    failure: RewardFailure = RewardFailure.DROP_GROUP,
) -> tuple[list[Score], Scorer]:
    async def run() -> tuple[list[Score], Scorer]:
        async with Scorer([Reward.model_validate_json(json.dumps(reward)) for reward in rewards], failure) as scorer:
            return list(await asyncio.gather(*map(scorer.score, completions))), scorer

    return asyncio.run(run())


def _totals(reward: Mapping[str, Any], *completions: Completion) -> list[float]:
    return [score.total for score in _scored([reward], completions)[0]]


def _own(function: str, **more: Any) -> dict[str, Any]:
    return {"module": f"own_rewards:{function}", "modulePath": FOLDER, **more}


def test_an_exact_match_is_the_reference_but_for_spaces_around() -> None:
    found = _totals({"name": "exact-match"}, _completion(" 7\n"), _completion("7.0"), _completion("it is 7"))
    assert found == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("it is 1,200", "3 boxes\n#### 1200", 1),
        ("-5", "5", 0),
        ("5.0 apples", "5", 1),
        ("2 or 3", "2", 0),
        ("none", "0", 0),
    ],
)
def test_the_last_number_counts(text: str, answer: str, expected: float) -> None:
    assert _totals({"name": "numeric"}, _completion(text, answer)) == [expected]


def test_math_is_equal_in_whatever_form() -> None:
    completions = [
        _completion(r"so $\frac{2}{4}$", r"$\frac{1}{2}$"),
        _completion(r"$\boxed{0.5}$", "0.5"),
        _completion("$3$", "4"),
        _completion("no idea", "4"),
    ]
    assert _totals({"name": "math", "timeoutSeconds": 240}, *completions) == [1, 1, 0, 0]


def test_a_format_is_matched_by_the_whole_answer() -> None:
    reward = {"name": "format", "pattern": "<a>.*</a>"}
    assert _totals(reward, _completion("<a>1\n2</a>"), _completion("<a>1</a>!")) == [1, 0]


def test_a_length_is_a_share_of_the_longest_answer() -> None:
    assert _totals({"name": "length", "weight": -2}, _completion("12345")) == [-1]


def test_functions_are_called_with_lists_and_every_field() -> None:
    completions = [_completion("7", "7"), _completion("8", "7")]
    assert _totals(_own("by_length"), _completion("abc"), _completion("")) == [3, 0]
    assert _totals(_own("as_asked"), *completions) == [1, 0]


def test_rewards_are_summed_by_weight_and_kept_apart() -> None:
    found, _ = _scored([{"name": "exact-match", "weight": 2}, _own("by_length")], [_completion("7")])
    assert found[0].total == 3
    assert dict(found[0].parts) == {"exact-match": 1, "own_rewards:by_length": 1}


@pytest.mark.parametrize(
    ("function", "says"),
    [("raises_at_bad", "ValueError: a bad one"), ("hangs_at_bad", "longer than"), ("dies_at_bad", "process died")],
)
def test_only_the_completion_that_is_to_blame_has_no_reward(function: str, says: str) -> None:
    reward = _own(function, timeoutSeconds=20)
    found, scorer = _scored([reward], [_completion(text) for text in ("good", "bad", "good", "good")])
    assert [math.isnan(score.total) for score in found] == [False, True, False, False]
    assert scorer.failures == {reward["module"]: 1}
    assert says in scorer.last_failure[reward["module"]]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (_own("gives_nan"), "no finite number"),
        (_own("one_too_few"), "0 scores"),
        (_own("missing"), "has no function missing"),
        ({"module": "there_is_none:f"}, "No module named"),
        ({"name": "numeric", "reference": "solution"}, "has no field solution"),
        ({"name": "format", "pattern": "("}, "no regular expression"),
        ({"name": "format", "pattern": "(a+)+b", "timeoutSeconds": 5}, "longer than 5 s"),
    ],
)
def test_a_failed_reward_is_named_and_no_number(reward: Mapping[str, Any], says: str) -> None:
    found, scorer = _scored([reward], [_completion("a" * 60)])
    assert math.isnan(found[0].total)
    assert says in next(iter(scorer.last_failure.values()))


def test_a_failed_reward_stops_the_run_where_that_is_asked_for() -> None:
    with pytest.raises(RewardFailed, match="rewardFailure is Stop: it returned nan"):
        _scored([_own("gives_nan")], [_completion("1")], RewardFailure.STOP)


@contextmanager
def _service(answers: list[tuple[int, object]]) -> Iterator[tuple[str, list[Any]]]:
    """Answers with these in turn, the last one for ever; notes what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            written = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(written)))
            self.end_headers()
            # A client may have read enough.
            with suppress(ConnectionError):
                self.wfile.write(written)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_service_is_asked_again_after_an_error_that_passes() -> None:
    with _service([(503, {}), (200, {"scores": [0.25]})]) as (url, asked):
        assert _totals({"url": url, "retries": 1}, _completion("7")) == [0.25]
    assert asked[-1] == {"prompts": ["3 + 4"], "completions": ["7"], "fields": [{"answer": "7"}]}
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((503, {}), "HTTP 503"),
        ((404, {}), "HTTP 404"),
        ((200, []), "no list `scores`"),
        ((200, {"scores": ["high"]}), "no finite number"),
    ],
)
def test_a_service_that_gives_no_score_has_failed(answer: tuple[int, object], says: str) -> None:
    with _service([answer]) as (url, _):
        found, scorer = _scored([{"url": url, "retries": 1}], [_completion("7")])
    assert math.isnan(found[0].total)
    assert says in scorer.last_failure[url]


def test_an_answer_of_a_service_is_read_up_to_a_bound_and_no_further() -> None:
    longest = {"scores": [1], "more": " " * _MOST_ANSWER_BYTES}
    with _service([(200, longest)]) as (url, _):
        found, scorer = _scored([{"url": url, "retries": 0}], [_completion("7")])
    assert math.isnan(found[0].total)
    assert f"its answer is longer than {_MOST_ANSWER_BYTES} bytes" in scorer.last_failure[url]


def test_a_service_gets_no_more_than_a_batch_at_once() -> None:
    with _service([(200, {"scores": [1, 1]})]) as (url, asked):
        assert _totals({"url": url, "batchSize": 2}, *[_completion("7")] * 8) == [1] * 8
    assert {len(each["prompts"]) for each in asked} == {2}
