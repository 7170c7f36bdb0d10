"""Rewards score in processes of their own, and a failed one is never a silent zero."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moejob_api.contract.pods import Environment
from moejob_api.job.grpo import Reward, RewardFailure
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.rewards.completion import Completion
from moejob_trainer.rewards.confinement import worker_environment
from moejob_trainer.rewards.scorer import CompletionScore, Scorer, reward_names
from moejob_trainer.rewards.service import _MOST_REPLY_BYTES
from ports import free_port

FOLDER = str(Path(__file__).parent)


def _completion(text: str, answer: str = "7", **fields: object) -> Completion:
    return Completion("3 + 4", text, tokens=len(text), max_new_tokens=10, fields={"answer": answer, **fields})


def _reward(values: Mapping[str, Any]) -> Reward:
    return Reward.model_validate_json(json.dumps(values))


def _scored(
    rewards: Sequence[Mapping[str, Any]],
    completions: Sequence[Completion],
    failure: RewardFailure = RewardFailure.DROP_GROUP,
) -> tuple[list[CompletionScore], Scorer]:
    async def run() -> tuple[list[CompletionScore], Scorer]:
        async with Scorer([_reward(reward) for reward in rewards], failure) as scorer:
            return list(await asyncio.gather(*map(scorer.score_completion, completions))), scorer

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
    reward = _own(function, timeoutSeconds=5)
    found, scorer = _scored([reward], [_completion(text) for text in ("good", "bad", "good", "good")])
    assert [math.isnan(score.total) for score in found] == [False, True, False, False]
    assert scorer.failures == {reward["module"]: 1}
    assert says in scorer.last_failure[reward["module"]]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (_own("gives_nan"), "no finite number"),
        (_own("one_too_few"), "wrong count: it returned 0 scores for 1 completions"),
        ({"name": "numeric", "reference": "solution"}, "record has no reference: the record of the prompt has no"),
        ({"name": "format", "pattern": "(a+)+b", "timeoutSeconds": 5}, "longer than 5 s"),
    ],
)
def test_a_failed_reward_is_named_and_no_number(reward: Mapping[str, Any], says: str) -> None:
    found, scorer = _scored([reward], [_completion("a" * 60)])
    assert math.isnan(found[0].total)
    assert says in next(iter(scorer.last_failure.values()))


def test_a_failed_reward_stops_the_run_where_that_is_asked_for() -> None:
    with pytest.raises(BadConfiguration, match=r"rewardFailure is Stop \(not finite: it returned nan"):
        _scored([_own("gives_nan")], [_completion("1")], RewardFailure.STOP)


@contextmanager
def _service(
    answers: list[tuple[int, object]], headers: list[Mapping[str, str]] | None = None, port: int = 0
) -> Iterator[tuple[str, list[Any]]]:
    """Answers with these in turn, the last one for ever; notes what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if headers is not None:
                headers.append(dict(self.headers.items()))
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

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (_own("missing"), "module own_rewards has no function missing"),
        ({"module": "own_rewards"}, "own_rewards names no function; write package.module:function"),
        (
            {"module": "there_is_none:f"},
            "there_is_none cannot be imported in this Python; set modulePath, or install it",
        ),
        (_own("f", module="fails_at_import:f"), "ModuleNotFoundError: No module named 'not_in_any_image' ["),
        (_own("f", module="exits_at_import:f"), "SystemExit: 3"),
        ({"name": "format", "pattern": "("}, "no regular expression"),
        ({"url": "judge:8000/score"}, "is no http:// or https:// URL"),
        ({"url": "http://judge", "headersFrom": [{"header": "A", "variable": "NOT_SET"}]}, "NOT_SET, which is not set"),
    ],
)
def test_a_reward_that_cannot_start_ends_the_run(reward: Mapping[str, Any], says: str) -> None:
    with pytest.raises(BadConfiguration, match=re.escape(says)):
        asyncio.run(_started(reward))


def test_a_failed_import_shows_the_last_frames_of_the_users_traceback() -> None:
    with pytest.raises(BadConfiguration) as caught:
        _scored([_own("f", module="fails_at_import:f")], [_completion("1")])
    assert f"[{FOLDER}/fails_at_import.py:9 in <module>: load()]" in str(caught.value)
    assert f"[{FOLDER}/fails_at_import.py:6 in load: import not_in_any_image" in str(caught.value)
    assert "moejob_trainer" not in str(caught.value)


def test_an_import_may_take_longer_than_a_batch() -> None:
    assert _totals(_own("f", module="slow_import:f", timeoutSeconds=1), _completion("1")) == [1]


def test_an_import_has_a_limit_of_its_own() -> None:
    with pytest.raises(BadConfiguration, match=r"imported everything after 1 s; raise startTimeoutSeconds"):
        asyncio.run(_started(_own("f", module="slow_import:f", startTimeoutSeconds=1)))


async def _started(reward: Mapping[str, Any]) -> None:
    async with Scorer([_reward(reward)], RewardFailure.DROP_GROUP) as scorer:
        await scorer.wait_until_ready()


def test_an_import_is_not_repeated_after_a_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = tmp_path / "imports"
    monkeypatch.setenv("IMPORTS", str(imports))
    reward = _own("f", module="counted_import:hangs_at_bad", timeoutSeconds=1, concurrency=1)
    values, _ = _scored([reward], [_completion(text) for text in ("bad", "good", "bad", "good")])
    assert [math.isnan(value.total) for value in values] == [True, False, True, False]
    assert imports.read_text() == "imported\n"


def test_functions_may_be_called_with_messages_as_trl_calls_them() -> None:
    reward = _own("last_words", conversational=True)
    asked = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "3 + 4"})
    chat = Completion("<s>3 + 4", "7", 1, 10, {"answer": "7"}, asked)
    assert _totals(reward, chat, _completion("8"), _completion("7")) == [2, 0, 1]


def test_a_function_without_messages_gets_the_text_of_a_chat() -> None:
    chat = Completion("<s>3 + 4", "7", 1, 10, {"answer": "7"}, ({"role": "user", "content": "3 + 4"},))
    assert _totals(_own("prompt_length"), chat) == [8]


def test_the_loop_of_async_functions_is_the_same_for_every_batch() -> None:
    assert _totals(_own("same_loop", batchSize=1, concurrency=1), *[_completion("7")] * 3) == [1, 1, 1]


def test_a_process_knows_no_secret_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Environment.SECRET, "of the job")
    monkeypatch.setenv("JUDGE_TOKEN", "of the user")
    assert _totals(_own("environment"), _completion("MOEJOB_SECRET"), _completion("JUDGE_TOKEN")) == [0, 1]
    built_in = worker_environment(_reward({"name": "math"}), os.environ)
    assert "JUDGE_TOKEN" not in built_in
    assert "PATH" in built_in


def test_rewards_have_the_names_that_metrics_show() -> None:
    rewards: list[dict[str, Any]] = [
        {"name": "math"},
        {"module": "a.b:c"},
        {"module": "a.b:c"},
        {"url": "https://user:password@judge.svc:8080/score?token=secret#part"},
        {"url": "http://judge?token=secret"},
        {"url": "http://judge/a@b", "metricName": "judge"},
    ]
    names = reward_names([_reward(reward) for reward in rewards])
    assert names == ("math", "a.b:c", "a.b:c-2", "https://judge.svc:8080/score", "http://judge", "judge")


def test_as_many_processes_score_at_once_as_the_job_says(tmp_path: Path) -> None:
    reward = _own("meets_others", concurrency=3, batchSize=1, timeoutSeconds=240)
    fields: dict[str, Any] = {"folder": str(tmp_path), "others": 3}
    assert _totals(reward, *[_completion(str(number), **fields) for number in range(3)]) == [1, 1, 1]


def test_a_service_is_asked_again_after_an_error_that_passes() -> None:
    with _service([(503, {}), (200, {"scores": [0.25]})]) as (url, asked):
        assert _totals({"url": url, "retries": 1}, _completion("7")) == [0.25]
    assert asked[-1] == {"prompts": ["3 + 4"], "completions": ["7"], "fields": [{"answer": "7"}]}
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, {}), "service error: ServerError: HTTP 500"),
        ((422, {}), "service error: http://127.0.0.1"),
        ((200, []), "no list `scores`"),
        ((200, {"scores": ["high"]}), "no finite number"),
    ],
)
def test_a_service_that_gives_no_score_has_failed(answer: tuple[int, object], says: str) -> None:
    with _service([answer]) as (url, _):
        found, scorer = _scored([{"url": url, "retries": 1}], [_completion("7")])
    assert math.isnan(found[0].total)
    assert says in scorer.last_failure[url]


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "give its token in headersFrom"), (404, "check url"), (307, "a redirect is not followed")],
)
def test_a_service_that_refuses_ends_the_run(status: int, says: str) -> None:
    with _service([(status, {})]) as (url, asked), pytest.raises(BadConfiguration, match=f"HTTP {status}; {says}"):
        _scored([{"url": url}], [_completion("7")])
    assert len(asked) == 1


def test_a_service_gets_the_headers_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "Bearer secret\n")
    headers: list[Mapping[str, str]] = []
    with _service([(200, {"scores": [1]})], headers) as (url, _):
        reward = {"url": url, "headersFrom": [{"header": "Authorization", "variable": "JUDGE_TOKEN"}]}
        assert _totals(reward, _completion("7")) == [1]
    assert headers[0]["Authorization"] == "Bearer secret"


def test_a_service_that_is_away_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    reward = {
        "url": f"http://user:secret@127.0.0.1:{port}/?token=secret",
        "retries": 0,
        "unavailableTimeoutSeconds": 240,
    }

    async def scored() -> float:
        async with Scorer([_reward(reward)], RewardFailure.STOP) as scorer:
            waiting = asyncio.create_task(scorer.score_completion(_completion("7")))
            while "is away" not in capsys.readouterr().err:  # noqa: ASYNC110 a line of the log is no event
                await asyncio.sleep(0.05)
            with _service([(502, {}), (200, {"scores": [1]})], port=port):
                return (await waiting).total

    assert asyncio.run(scored()) == 1


def test_a_service_that_stays_away_lets_the_run_be_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://user:secret@127.0.0.1:{free_port()}/?token=secret"
    with pytest.raises(TransientFailure, match="unavailableTimeoutSeconds") as caught:
        _scored([{"url": url, "unavailableTimeoutSeconds": 1}], [_completion("7")], RewardFailure.STOP)
    assert "secret" not in str(caught.value) + capsys.readouterr().err


def test_an_answer_of_a_service_is_read_up_to_a_bound_and_no_further() -> None:
    longest = {"scores": [1], "more": " " * _MOST_REPLY_BYTES}
    with _service([(200, longest)]) as (url, _):
        found, scorer = _scored([{"url": url, "retries": 0}], [_completion("7")])
    assert math.isnan(found[0].total)
    assert f"its answer is longer than {_MOST_REPLY_BYTES} bytes" in scorer.last_failure[url]


def test_a_service_gets_no_more_than_a_batch_at_once() -> None:
    with _service([(200, {"scores": [1, 1]})]) as (url, asked):
        assert _totals({"url": url, "batchSize": 2}, *[_completion("7")] * 8) == [1] * 8
    assert {len(each["prompts"]) for each in asked} == {2}
