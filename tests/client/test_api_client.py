"""Requests to an API server: what its refusals mean, deadlines, pages, and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from moejob_client.api_client import ApiClient, requested_resource
from moejob_client.credentials import Credentials, load_credentials
from moejob_client.errors import AlreadyExists, NotFound
from moejob_operator.cluster import Conflict, Forbidden, Retryable
from stand_in_api import Answer, list_answer, refusal_answer, serve_stand_in

POD = "/api/v1/namespaces/default/pods/a"


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        pytest.param(refusal_answer(404, "NotFound"), NotFound, id="no such object"),
        pytest.param(refusal_answer(409, "AlreadyExists"), AlreadyExists, id="there already"),
        pytest.param(refusal_answer(409, "Conflict"), Conflict, id="changed since it was read"),
        pytest.param(refusal_answer(401, "Unauthorized"), Retryable, id="a token that has just run out"),
        pytest.param(refusal_answer(403, "Forbidden"), Forbidden, id="quota or RBAC"),
        pytest.param(refusal_answer(422, "Invalid"), Forbidden, id="invalid"),
        pytest.param(refusal_answer(400, "BadRequest"), Forbidden, id="a bad request"),
        pytest.param(refusal_answer(410, "Expired"), Retryable, id="a list that took too long"),
        pytest.param(refusal_answer(429, "TooManyRequests"), Retryable, id="too many requests"),
        pytest.param(refusal_answer(500, "InternalError"), Retryable, id="a broken API server"),
        pytest.param((503, "upstream connect error"), Retryable, id="a proxy in front of it"),
        pytest.param((404, "404 page not found"), NotFound, id="no such API"),
        pytest.param((200, "<html>"), Retryable, id="another server's answer"),
        pytest.param((200, []), Retryable, id="JSON that is no object"),
    ],
)
def test_a_refusal_says_whether_to_try_again(answer: Answer, raised: type[Exception]) -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(f"GET {POD}", answer)
            with pytest.raises(raised):
                await api.get(POD)

    asyncio.run(story())


def test_a_refusal_carries_the_words_of_the_api_server() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(f"GET {POD}", refusal_answer(403, "Forbidden", 'pods "a" is forbidden: exceeded quota'))
            with pytest.raises(Forbidden, match=r'^pods "a" is forbidden: exceeded quota$'):
                await api.get(POD)
            server.set_answers(f"GET {POD}", (502, "bad gateway"))
            with pytest.raises(Retryable, match=r"^get .*/pods/a: 502 bad gateway$"):
                await api.get(POD)

    asyncio.run(story())


def test_an_api_server_that_is_not_there_is_tried_again() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            pass
        async with serve_stand_in() as (other, api):
            api._credentials = replace(api._credentials, host=server.url)  # noqa: SLF001
            with pytest.raises(Retryable, match="does not answer"):
                await api.get(POD)
            assert other.metrics.seen == [("get", "pods", "unreachable")]

    asyncio.run(story())


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    async def story() -> None:
        async with serve_stand_in(seconds=0.05) as (server, api):
            server.answering.clear()
            with pytest.raises(Retryable, match=r"0\.05 s passed"):
                await api.get(POD)
            assert server.metrics.seen == [("get", "pods", "timeout")]

    asyncio.run(story())


def test_a_write_may_have_less_time_than_a_request_has() -> None:
    async def story() -> None:
        async with serve_stand_in(seconds=60) as (server, api):
            server.answering.clear()
            with pytest.raises(Retryable):
                await api.create("/api/v1/namespaces/default/pods", {}, within=0.05)

    asyncio.run(story())


def test_no_more_requests_are_on_their_way_than_allowed() -> None:
    async def story() -> None:
        async with serve_stand_in(concurrency=2) as (server, api):
            server.answering.clear()
            asked = [asyncio.ensure_future(api.get(POD)) for _ in range(6)]
            await server.await_request(f"GET {POD}", times=2)
            # A request that began after all of them has come, over a connection of its own: so would a third have.
            late = ApiClient(Credentials(host=server.url), server.metrics, concurrency=1, seconds=60)
            asked.append(asyncio.ensure_future(late.get("/late")))
            await server.await_request("GET /late")
            assert server.calls.count(f"GET {POD}") == 2
            server.answering.set()
            done, _ = await asyncio.wait(asked)
            assert all(isinstance(task.exception(), NotFound) for task in done)
            assert server.calls.count(f"GET {POD}") == 6
            await late.close()

    asyncio.run(story())


def test_a_request_that_waits_for_others_runs_out_of_time_too() -> None:
    async def story() -> None:
        async with serve_stand_in(seconds=0.1, concurrency=1) as (server, api):
            server.answering.clear()
            asked = [asyncio.ensure_future(api.get(POD)) for _ in range(6)]
            done, _ = await asyncio.wait(asked, timeout=300)
            assert len(done) == 6
            assert all(isinstance(task.exception(), Retryable) for task in done)

    asyncio.run(story())


def test_a_list_is_read_page_by_page_at_one_version_and_its_items_say_what_they_are() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(
                "GET /api/v1/pods",
                list_answer({"metadata": {"name": "a"}}, version="7", more="token/1"),
                list_answer({"metadata": {"name": "b"}}, version="9"),
            )
            pages = [page async for page in api.list_pages("/api/v1/pods", {"labelSelector": "x=y"})]
            assert [page.version for page in pages] == ["7", "7"]
            assert [
                (item["kind"], item["apiVersion"], item["metadata"]["name"]) for page in pages for item in page.items
            ] == [
                ("Pod", "v1", "a"),
                ("Pod", "v1", "b"),
            ]
            first, second = server.requests
            assert (first.query["labelSelector"], first.query.get("continue")) == ("x=y", None)
            assert (second.query["labelSelector"], second.query["continue"]) == ("x=y", "token/1")

    asyncio.run(story())


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/namespaces/default/pods/job-trainer-0-00000", "pods"),
        ("/api/v1/pods?labelSelector=a", "pods"),
        ("/api/v1/nodes/node-1", "nodes"),
        ("/apis/moejob.dev/v1alpha1/namespaces/default/moetrainingjobs/job/status", "moetrainingjobs/status"),
        ("/apis/coordination.k8s.io/v1/namespaces/default/leases", "leases"),
        ("/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/x", "validatingwebhookconfigurations"),
        ("/apis", "discovery"),
        ("/apis/scheduling.k8s.io/v1alpha2", "discovery"),
    ],
)
def test_metrics_name_resources_and_never_objects(path: str, resource: str) -> None:
    assert requested_resource(path) == resource


def test_requests_say_who_asks_and_carry_the_token_of_the_kubeconfig(tmp_path: Path) -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, _):
            kubeconfig = tmp_path / "config"
            kubeconfig.write_text(
                f"""
                apiVersion: v1
                kind: Config
                current-context: here
                contexts: [{{name: here, context: {{cluster: here, user: me}}}}]
                clusters: [{{name: here, cluster: {{server: "{server.url}"}}}}]
                users: [{{name: me, user: {{token: secret}}}}]
                """
            )
            found = await load_credentials(kubeconfig)
            assert found.host == server.url
            assert (await found.find_authorization() or "").lower() == "bearer secret"

    asyncio.run(story())
