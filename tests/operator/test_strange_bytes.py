"""Ten thousand damaged inputs for each listener of the operator and each parser of what others wrote.

Each is answered, refused or read within its bounds; nothing else is raised. `make fuzz` draws a million others.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from builders import SFT
from connections import SentConnection
from fuzzing import GROWTH_MIB, damage_sample, random_sources
from json_grammar import MessageGrammar
from moejob_api.contract.pods import (
    TERMINATION_BYTES,
    PodOutcome,
    PodProgress,
    PodRole,
    RankFault,
    ReportedHeartbeat,
    RunProgress,
    TerminationMessage,
    printable_text,
)
from moejob_api.job.status import HubCommit, RepositoryKind
from moejob_cli.running.steps import StepLog, tokens_per_second
from moejob_operator.admission.listener import BoundedServer, ListenerLimits
from moejob_operator.admission.review import HANDLER, PATH
from moejob_operator.admission.server import AdmissionServer, InvalidReview, read_review
from moejob_operator.kube_api.pod_client import HEAD_BYTES, PROGRESS_BYTES, MutePod, parse_progress, read_response_body
from moejob_operator.observed.ownership import PodPlace
from moejob_operator.observed.pods import read_pod
from moejob_operator.runtime import health
from moejob_operator.runtime.metrics import Metrics

COMMIT = HubCommit(kind=RepositoryKind.MODEL, name="team/tiny", commit="a" * 40)
RUN = RunProgress(step=7, total_steps=100, loss=0.5, last_checkpoint_step=5, hub_commits=(COMMIT,))
FAULT = RankFault(outcome=PodOutcome.RANK_FAILED, message="CUDA error", rank=1, exit_code=-9)
PROGRESS = PodProgress(
    attempt=1, index=0, fault=FAULT, ranks=(ReportedHeartbeat(rank=0, pid=7, step=7, age_seconds=1.5),), run=RUN
)
WORD = TerminationMessage(outcome=PodOutcome.COMPLETED, message="done", rank=0, exit_code=0, run=RUN, fault=FAULT)
# Ten times what the longest of a million took.
PARSING_SECONDS = 0.04
PLACE = PodPlace(PodRole.TRAINER, 0, 0)
REVIEW: Mapping[str, Any] = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "1",
        "operation": "CREATE",
        "resource": {"group": "moejob.dev", "version": "v1alpha1", "resource": "moetrainingjobs"},
        "userInfo": {"username": "a user"},
        "object": {"metadata": {"name": "job", "uid": "1"}, "spec": SFT},
    },
}


def as_json(model: PodProgress | TerminationMessage) -> bytes:
    return model.model_dump_json(by_alias=True, exclude_none=True).encode()


def test_what_takes_too_much_memory_fails() -> None:
    draws = random_sources()
    next(draws)
    # Free again at once.
    assert b"\1" * (2 * GROWTH_MIB * 2**20)
    with pytest.raises(AssertionError, match="MiB more were resident at the worst moment"):
        deque(draws, maxlen=0)


def test_of_an_answer_of_a_pod_at_most_a_progress_is_read() -> None:
    body = as_json(PROGRESS)
    answers = [b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + body, b"HTTP/1.1 103 Early Hints\r\n\r\n"]

    async def story() -> int:
        count = 0
        for draw in random_sources():
            reader = asyncio.StreamReader(limit=HEAD_BYTES)
            reader.feed_data(damage_sample(draw, answers) * draw.choice((1, 1, 1, 100)))
            reader.feed_eof()
            try:
                content = await read_response_body(reader)
                assert len(content) <= PROGRESS_BYTES
                found = parse_progress(content)
            except MutePod:
                continue
            count += 1
            assert len(as_json(found)) < 2 * PROGRESS_BYTES
        return count

    assert asyncio.run(story()) > 0


def test_no_words_of_a_pod_take_long_to_read() -> None:
    """Pods may send any message at any poll, and the loop that reads it also renews the Lease."""
    progress, message = MessageGrammar(PodProgress), MessageGrammar(TerminationMessage)
    readable = 0
    for draw in random_sources():
        body = progress.write_message(draw, PROGRESS_BYTES)
        assert parsing_seconds(partial(find_refusal, body)) < PARSING_SECONDS, body[:200]
        refusal = find_refusal(body)
        assert len(refusal) < 100
        readable += not refusal
        text = message.write_message(draw, TERMINATION_BYTES).decode(errors="replace")
        ended: dict[str, Any] = {"status": {"containerStatuses": [{"state": {"terminated": {"message": text}}}]}}
        assert parsing_seconds(partial(read_pod, ended, PLACE)) < PARSING_SECONDS, text[:200]
    assert readable > 0


def find_refusal(body: bytes) -> str:
    """Return why a body is no progress; nothing when it is."""
    try:
        parse_progress(body)
    except MutePod as error:
        return str(error)
    return ""


def parsing_seconds(parse: Callable[[], object]) -> float:
    """Return the CPU time of this thread in a function; the least of three where the first is long."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        parse()
        times.append(time.thread_time() - start)
        if times[0] < PARSING_SECONDS:
            break
    return min(times)


def test_a_termination_message_is_read_or_shown_and_cannot_write_on_a_terminal() -> None:
    read = 0
    for draw in random_sources():
        message = damage_sample(draw, [as_json(WORD)]).decode(errors="replace")
        terminated = {"exitCode": draw.choice((0, 1, None, "1")), "message": message, "finishedAt": message[:30]}
        ended = read_pod({"status": {"containerStatuses": [{"state": {"terminated": terminated}}]}}, PLACE).ended
        assert ended is not None
        assert printable_text(ended.message) == ended.message
        assert len(ended.message) <= TERMINATION_BYTES
        read += ended.termination is not None
    assert read > 0


def test_a_damaged_review_is_refused_or_is_one_of_a_job() -> None:
    read = 0
    for draw in random_sources():
        try:
            found = read_review(damage_sample(draw, [json.dumps(REVIEW).encode()]))
        except InvalidReview:
            continue
        read += 1
        for name in ("object", "oldObject"):
            assert set((found.shown["request"][name] or {}).get("metadata", {})) <= {"name", "namespace"}
    assert read > 0


def test_lines_of_a_step_log_are_read_or_passed_over(tmp_path: Path) -> None:
    lines = [b'{"step": 1, "loss": 2.5, "seconds": 0.5, "tokens": 512}', b'{"step": 2, "loss": 2.25, "evalLoss": 2.0}']
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    with path.open("wb", buffering=0) as written:
        for draw in random_sources():
            written.write(damage_sample(draw, lines) + b"\n")
            log.read()
    assert [line.step for line in log.lines] == sorted({line.step for line in log.lines})
    tokens_per_second(log.lines)


# --- listeners ------------------------------------------------------------------------------------------------------


class _NoMetrics:
    def count_review(self, answer: str, seconds: float) -> None: ...


async def allowed(request: Any, **asked: object) -> Any:
    """Stand for kopf."""
    assert asked == {"webhook": HANDLER}
    return {"response": {"uid": request["request"]["uid"], "allowed": True}}


async def webhook() -> web.Server:
    server = AdmissionServer(ssl.create_default_context(), asyncio.Event(), 0, _NoMetrics())
    # Behind TLS, which is OpenSSL's to test.
    return BoundedServer(lambda request: server._handle_request(request, allowed), ListenerLimits())  # noqa: SLF001


async def served_health() -> web.Server:
    return BoundedServer(health.health_handler(Metrics(), dict, dict), health.LIMITS)


SENT = json.dumps(REVIEW).encode()


@pytest.mark.parametrize(
    ("listener", "request_bytes"),
    [
        pytest.param(
            webhook,
            f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(SENT)}\r\n\r\n".encode() + SENT,
            id="webhook",
        ),
        pytest.param(served_health, b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n", id="metrics"),
    ],
)
def test_a_listener_answers_whatever_it_is_sent(
    listener: Callable[[], Awaitable[web.Server]], request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """And writes nothing into the log, which strangers could fill."""

    async def story() -> None:
        server, answers = await listener(), 0
        complaints = list[Mapping[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        for draw in random_sources():
            protocol, connection = server(), SentConnection()
            protocol.connection_made(connection)
            protocol.data_received(damage_sample(draw, [request_bytes]))
            protocol.eof_received()
            for _ in range(4):
                # Its task begins, and reads; what a thread works out is not waited for.
                await asyncio.sleep(0)
            protocol.connection_lost(None)
            assert connection.answer[:5] in (b"", b"HTTP/")
            answers += bool(connection.answer)
        await asyncio.sleep(0)
        assert complaints == []
        assert answers > 0

    asyncio.run(story())
    assert {record.name for record in caplog.records} == set()
