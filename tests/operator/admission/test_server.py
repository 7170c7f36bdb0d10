"""The admission server: real TLS, kopf's real handling of a review, and what strangers may send."""

from __future__ import annotations

import asyncio
import inspect
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf
import pytest

from builders import SFT, merge_sections
from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_api.rules.limits import DEFAULT_LIMITS, JobLimits
from moejob_operator.admission import review
from moejob_operator.admission.certificates import KeyPair, load_pair, make_pair, service_hosts, utc_now
from moejob_operator.admission.listener import ListenerLimits
from moejob_operator.admission.review import ReviewTurns
from moejob_operator.admission.server import BODY_BYTES, OWN_BYTES, VALUES, AdmissionServer, InvalidReview, read_review
from moejob_operator.handlers import validate
from moejob_operator.runtime.assembly import REVIEWERS
from moejob_operator.runtime.kopf_settings import configure_kopf
from stand_in_api import list_answer, serve_stand_in

HOSTS = service_hosts("moejob-webhook", "moejob-system")
FIRST, SECOND = make_pair(HOSTS, utc_now()), make_pair(HOSTS, utc_now())
# Two GPUs hold no model of 30 B parameters.
FITTING: dict[str, Any] = {
    "parallelism": {"tensor": 4, "expert": 4},
    "resources": {"gpusPerNode": 8, "gpuType": "H100"},
    "storage": {"accessModes": ["ReadWriteMany"]},
}
NO_LAYOUT: dict[str, Any] = merge_sections(FITTING, {"parallelism": {"tensor": 3}})
MISSPELT: dict[str, Any] = merge_sections(FITTING, {"parallelism": {"tensr": 4}, "training": {"maxSteps": "ten"}})


def body(**sections: Any) -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "MoETrainingJob",
        "metadata": {"name": "job", "namespace": "default", "uid": "1"},
        "spec": merge_sections(SFT, sections),
    }


def asked(new: object, old: object = None, operation: str = "CREATE", **request: Any) -> dict[str, Any]:
    """An AdmissionReview as an API server sends it."""
    known = {
        "uid": "review-1",
        "operation": operation,
        "resource": {"group": GROUP, "version": VERSION, "resource": PLURAL},
        "userInfo": {"username": "somebody"},
        "object": new,
        "oldObject": old,
        "dryRun": False,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": known | request}


@dataclass
class Reviews:
    """Metrics that remember."""

    answers: list[str] = field(default_factory=list)

    def count_review(self, answer: str, seconds: float) -> None:
        assert seconds >= 0
        self.answers.append(answer)


@dataclass
class Served:
    """A server that kopf runs, and a client that trusts it."""

    server: AdmissionServer
    metrics: Reviews
    client: aiohttp.ClientSession
    pair: KeyPair = FIRST

    @property
    def port(self) -> int:
        assert self.server.served_port is not None
        return self.server.served_port

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.pair.authority.decode())

    async def post(self, sent: str | bytes, path: str = review.PATH) -> tuple[int, Any]:
        """Code and answer, which is read as JSON when it is."""
        url = f"https://127.0.0.1:{self.port}{path}"
        async with self.client.post(url, data=sent, ssl=self.trust(), server_hostname=HOSTS[0]) as said:
            text = await said.text()
            return said.status, json.loads(text) if said.content_type == "application/json" else text

    async def review(self, *arguments: Any) -> Any:
        code, said = await self.post(json.dumps(asked(*arguments)))
        assert code == 200
        assert (said["apiVersion"], said["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        assert said["response"]["uid"] == "review-1"
        return said["response"]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trust(), server_hostname=HOSTS[0])


@asynccontextmanager
async def served(
    limits: ListenerLimits | None = None,
    body_seconds: float = 5.0,
    handler: Any = validate,
    job_limits: JobLimits = DEFAULT_LIMITS,
    turns: ReviewTurns | None = None,
) -> AsyncIterator[Served]:
    context, certified, metrics = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), asyncio.Event(), Reviews()
    load_pair(context, FIRST)
    certified.set()
    server = AdmissionServer(
        context,
        certified,
        0,
        metrics,
        host="127.0.0.1",
        limits=limits or ListenerLimits(),
        body_seconds=body_seconds,
        turns=turns or ReviewTurns(),
    )
    reviewers = ThreadPoolExecutor(REVIEWERS)
    registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    configure_kopf(settings, reviewers, server)
    kopf.on.validate(GROUP, VERSION, PLURAL, id=review.HANDLER, registry=registry)(handler)
    async with serve_stand_in() as (api, _), aiohttp.ClientSession() as client:
        api.serve_jobs()
        api.set_answers(f"GET /apis/{GROUP}/{VERSION}/{PLURAL}", list_answer())

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=api.url)

        memo = kopf.Memo(operator=SimpleNamespace(limits=job_limits, find_profile=lambda *_: None))
        running = asyncio.ensure_future(
            kopf.operator(registry=registry, settings=settings, memo=memo, clusterwide=True)
        )
        try:
            await until(lambda: server.is_serving)
            yield Served(server, metrics, client)
        finally:
            running.cancel()
            await asyncio.wait({running})
            reviewers.shutdown(wait=False)


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def played(story: Callable[[Served], Awaitable[None]], **options: Any) -> None:
    async def play() -> None:
        async with served(**options) as here:
            await story(here)

    asyncio.run(play())


# --- answers --------------------------------------------------------------------------------------------------------


def test_kopf_answers_and_a_denial_keeps_its_reason_and_its_causes() -> None:
    async def story(here: Served) -> None:
        assert await here.review(body(**FITTING)) == {"uid": "review-1", "allowed": True}
        said = await here.review(body(**MISSPELT))
        assert said["allowed"] is False
        assert (said["status"]["code"], said["status"]["reason"]) == (403, "Forbidden")
        causes = said["status"]["details"]["causes"]
        assert {cause["field"] for cause in causes} == {"spec.training.maxSteps", "spec.parallelism.tensr"}
        assert all(cause["message"] in said["status"]["message"] for cause in causes)
        # The one before leaves nothing behind.
        assert await here.review(body(**FITTING)) == {"uid": "review-1", "allowed": True}
        assert here.metrics.answers == ["allowed", "denied", "allowed"]

    played(story)


def test_reviews_at_the_same_time_keep_their_own_causes() -> None:
    async def story(here: Served) -> None:
        said = await asyncio.gather(*(here.review(body(**spec)) for spec in (MISSPELT, FITTING, NO_LAYOUT) * 4))
        fields = [
            {cause["field"] for cause in answer.get("status", {}).get("details", {}).get("causes", [])}
            for answer in said
        ]
        assert fields[:3] == fields[3:6] == fields[6:9] == fields[9:]
        assert fields[1] == set()
        assert "spec.parallelism.tensr" in fields[0]
        assert fields[0].isdisjoint(fields[2])

    played(story)


def test_any_number_of_searches_for_layouts_keeps_no_job_waiting_that_can_work() -> None:
    async def story(here: Served) -> None:
        here.server.turns.search.acquire()
        refused = [asyncio.ensure_future(here.review(body(**NO_LAYOUT))) for _ in range(8)]
        assert (await here.review(body(**FITTING)))["allowed"] is True
        assert not any(review.done() for review in refused)
        here.server.turns.search.release()
        answers = await asyncio.gather(*refused)
        assert all("What would be accepted" in answer["status"]["message"] for answer in answers)

    played(story, turns=ReviewTurns(search_seconds=600.0))


def test_what_is_unwise_is_allowed_with_a_warning() -> None:
    async def story(here: Served) -> None:
        said = await here.review(body(**merge_sections(FITTING, {"model": {"source": "pvc://models/mine"}})))
        assert said["allowed"] is True
        assert any("spec.model.source: not checked" in warning for warning in said["warnings"])

    played(story)


def test_a_job_beyond_the_limits_of_the_operator_is_denied_and_an_older_one_can_be_suspended() -> None:
    async def story(here: Served) -> None:
        job = body(**merge_sections(FITTING, {"resources": {"serviceAccount": "admin"}}))
        said = await here.review(job)
        assert said["allowed"] is False
        [cause] = said["status"]["details"]["causes"]
        assert cause["field"] == "spec.resources.serviceAccount"
        assert "limits.serviceAccounts" in cause["message"]
        suspended = job | {"spec": merge_sections(job["spec"], {"lifecycle": {"suspend": True}})}
        assert (await here.review(suspended, job, "UPDATE"))["allowed"] is True

    played(story, job_limits=JobLimits(service_accounts=("trainer",)))


def test_an_update_that_changes_nothing_is_allowed_and_a_worse_one_is_not() -> None:
    async def story(here: Served) -> None:
        refused = body(**NO_LAYOUT)
        assert (await here.review(refused | {"status": {"phase": "Failed"}}, refused, "UPDATE"))["allowed"] is True
        assert (await here.review(refused, body(**FITTING), "UPDATE"))["allowed"] is False
        assert (await here.review(None, refused, "DELETE"))["allowed"] is True

    played(story)


def test_a_slow_verdict_does_not_hold_up_the_event_loop() -> None:
    """A Lease is renewed in the same thread."""
    begun, lasts = threading.Event(), threading.Event()

    def slow(**_: Any) -> None:
        begun.set()
        assert lasts.wait(60)

    async def story(here: Served) -> None:
        reviewed = asyncio.ensure_future(here.review(body(**FITTING)))
        await until(begun.is_set)
        lasts.set()
        assert (await reviewed)["allowed"] is True

    assert not inspect.iscoroutinefunction(validate)
    played(story, handler=slow)


@pytest.mark.parametrize(
    ("sent", "code", "counted"),
    [
        pytest.param(json.dumps(asked(body(**NO_LAYOUT))), 200, "denied", id="a bad job"),
        pytest.param("{}", 400, "unreadable", id="no review"),
        pytest.param("{", 400, "unreadable", id="no JSON"),
        pytest.param(b"\xff\xfe", 400, "unreadable", id="no text"),
        pytest.param("[" * VALUES, 400, "unreadable", id="nested without end"),
        pytest.param(
            json.dumps(asked({"deep": 0})).replace("0}", '{"a":' * 800 + "1" + "}" * 800 + "}", 1),
            200,
            "denied",
            id="nested deep",
        ),
        pytest.param(b" " * (BODY_BYTES + 1), 413, "unreadable", id="too large"),
        pytest.param(json.dumps(asked(body(**FITTING))) + " " * 3_500_000, 200, "allowed", id="large"),
        pytest.param('{"request": {"uid": "1", "object": ' + "9" * 5000 + "}}", 400, "unreadable", id="a long number"),
        pytest.param(json.dumps(asked(body(), resource={"resource": "pods"})), 400, "unreadable", id="a pod"),
        pytest.param(json.dumps(asked(1)), 400, "unreadable", id="a number for a job"),
        pytest.param(json.dumps(asked([[]] * (VALUES + 1))), 413, "unreadable", id="values without end"),
    ],
)
def test_the_server_answers_whatever_it_is_sent(sent: str | bytes, code: int, counted: str) -> None:
    async def story(here: Served) -> None:
        assert (await here.post(sent))[0] == code
        assert here.metrics.answers == [counted]

    played(story)


def test_nothing_else_is_served() -> None:
    async def story(here: Served) -> None:
        assert (await here.post("{}", "/elsewhere"))[0] == 404

    played(story)


@pytest.mark.parametrize(
    "anything",
    [None, [], {}, {"request": None}, {"request": {}}, {"request": {"uid": 1}}, asked(None), asked({"metadata": 1})],
)
def test_what_is_no_review_is_refused_as_such(anything: object) -> None:
    with pytest.raises(InvalidReview):
        read_review(json.dumps(anything).encode())


def test_kopf_is_shown_names_alone_and_compares_and_remembers_nothing_that_strangers_invent() -> None:
    found = read_review(json.dumps(asked(body(), body(**FITTING), "UPDATE")).encode())
    shown = {"metadata": {"name": "job", "namespace": "default"}, "apiVersion": f"{GROUP}/{VERSION}"}
    for name in ("object", "oldObject"):
        assert found.shown["request"][name] == shown | {"kind": "MoETrainingJob"}
    assert (found.new, found.old) == (body(), body(**FITTING))


# --- certificates ---------------------------------------------------------------------------------------------------


def test_a_new_certificate_is_served_without_a_restart_and_on_the_same_port() -> None:
    async def story(here: Served) -> None:
        port = here.port
        load_pair(here.server.context, SECOND)
        here.pair = SECOND
        assert (await here.review(body(**FITTING)))["allowed"] is True
        assert here.port == port
        here.pair = FIRST
        await here.client.connector.close()  # type: ignore[union-attr]

    played(story)


# --- strangers ------------------------------------------------------------------------------------------------------


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async def story(here: Served) -> None:
        reader, writer = await here.connect()
        writer.write(b"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()

    played(story, body_seconds=0.2)


@pytest.mark.parametrize("sent", [b"", b"POST /validate HTTP/1.1\r\nX-Slow: "])
def test_a_connection_without_a_whole_request_is_closed(sent: bytes) -> None:
    async def story(here: Served) -> None:
        reader, writer = await here.connect()
        writer.write(sent)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()

    played(story, limits=ListenerLimits(idle_seconds=0.2))


@pytest.mark.parametrize("speaks_tls", [True, False])
def test_connections_that_say_nothing_give_way_to_a_review(speaks_tls: bool) -> None:
    async def story(here: Served) -> None:
        connect = here.connect if speaks_tls else lambda: asyncio.open_connection("127.0.0.1", here.port)
        silent = [await connect() for _ in range(2)]
        assert (await asyncio.wait_for(here.review(body(**FITTING)), 60))["allowed"] is True
        for _, writer in silent:
            writer.transport.abort()

    played(story, limits=ListenerLimits(connections=2, handshake_seconds=600.0, idle_seconds=600.0))


@pytest.mark.parametrize("is_known", [False, True])
def test_connections_whose_bodies_do_not_end_give_way_to_a_review(is_known: bool) -> None:
    """Also those that have asked something before and were answered."""

    async def story(here: Served) -> None:
        head = "POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{{"
        hogs = [await here.connect() for _ in range(2)]
        for reader, writer in hogs:
            if is_known:
                writer.write(head.format(1).encode())
                await reader.readuntil(b"\r\n\r\n")
            writer.write(head.format(1000).encode())
        assert (await asyncio.wait_for(here.review(body(**FITTING)), 60))["allowed"] is True
        for _, writer in hogs:
            writer.transport.abort()

    played(story, body_seconds=600.0, limits=ListenerLimits(connections=2, idle_seconds=600.0))


def test_of_more_reviews_than_there_is_room_for_none_is_ended_and_the_rest_waits() -> None:
    begun, lasts = threading.Semaphore(0), threading.Event()

    def slow(**_: Any) -> None:
        begun.release()
        assert lasts.wait(60)

    async def story(here: Served) -> None:
        reviews = [asyncio.ensure_future(here.review(body(**FITTING))) for _ in range(2)]
        for _ in reviews:
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        reviews.append(asyncio.ensure_future(here.review(body(**FITTING))))
        done, _ = await asyncio.wait(reviews, timeout=0.3)
        assert not done
        lasts.set()
        assert [answer["allowed"] for answer in await asyncio.gather(*reviews)] == [True, True, True]
        # The first two are kept open by their client, and wait for nothing of ours.
        assert here.metrics.answers == ["allowed"] * 3

    played(story, handler=slow, limits=ListenerLimits(connections=2, idle_seconds=600.0))


def test_a_review_of_the_usual_size_finds_room_however_much_others_hold() -> None:
    async def story(here: Served) -> None:
        head = f"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_BYTES}\r\n\r\n".encode()
        hogs = [await here.connect() for _ in range(2)]
        for _, writer in hogs:
            writer.write(head + b" " * (BODY_BYTES - 1))
        await until(lambda: here.server.held_bytes == 2 * (BODY_BYTES - 1))
        assert (await here.post(b" " * 2 * OWN_BYTES))[0] == 503
        assert (await here.review(body(**FITTING)))["allowed"] is True
        for _, writer in hogs:
            writer.transport.abort()

    played(story, body_seconds=60.0)


def test_of_large_reviews_one_is_read_at_a_time() -> None:
    """Read, a body takes many times its bytes."""
    begun, lasts, most, running = threading.Event(), threading.Event(), 0, 0

    def slow(**_: Any) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        begun.set()
        assert lasts.wait(60)
        running -= 1

    async def story(here: Served) -> None:
        large = json.dumps(asked(body(**FITTING))) + " " * (2 * OWN_BYTES)
        reviews = [asyncio.ensure_future(here.post(large)) for _ in range(3)]
        await until(begun.is_set)
        # The others have arrived, and wait.
        await until(lambda: here.server.held_bytes == 3 * len(large))
        assert most == 1
        lasts.set()
        assert [(await review)[0] for review in reviews] == [200, 200, 200]
        assert most == 1

    played(story, handler=slow)


def test_all_bodies_together_have_a_bound_and_their_room_comes_back() -> None:
    async def story(here: Served) -> None:
        head = f"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_BYTES}\r\n\r\n".encode()
        hogs = [await here.connect() for _ in range(10)]
        for _, writer in hogs:
            writer.write(head + b" " * (BODY_BYTES - 1))
        codes = [(await asyncio.wait_for(reader.readline(), 60)).split()[1] for reader, _ in hogs]
        assert {b"408", b"503"} == set(codes)
        assert (await here.review(body(**FITTING)))["allowed"] is True
        assert here.server.held_bytes == 0
        for _, writer in hogs:
            writer.transport.abort()

    played(story, body_seconds=10.0)
