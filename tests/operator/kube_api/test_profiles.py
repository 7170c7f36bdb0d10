"""Profiles over an API server with given answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from moejob_api.profiles.fields import ProfileKind
from moejob_api.profiles.reading import TrainingProfile
from moejob_client.errors import Retryable
from moejob_operator.kube_api import profiles
from moejob_operator.kube_api.profiles import ProfileReader, find_profile
from stand_in_api import Answer, refusal_answer, serve_stand_in

NEAR = "GET /apis/moejob.dev/v1beta1/namespaces/team/moetrainingprofiles/h100"
FAR = "GET /apis/moejob.dev/v1beta1/clustermoetrainingprofiles/h100"
BODY = {"metadata": {"name": "h100", "uid": "u", "generation": 3}, "spec": {"resources": {"gpuType": "H100"}}}
FOUND, ABSENT, FORBIDDEN = (200, BODY), refusal_answer(404, "NotFound"), refusal_answer(403, "Forbidden")


def find(answers: Mapping[str, Answer], name: str = "h100") -> tuple[TrainingProfile | None, list[str]]:
    async def ask() -> tuple[TrainingProfile | None, list[str]]:
        async with serve_stand_in() as (server, api):
            for request, answer in answers.items():
                server.set_answers(request, answer)
            return await find_profile(api, "team", name), server.calls

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("near", "far", "kind"),
    [
        pytest.param(FOUND, FOUND, ProfileKind.NAMESPACED, id="that of the namespace hides that of the cluster"),
        pytest.param(ABSENT, FOUND, ProfileKind.CLUSTER, id="that of the cluster"),
        pytest.param(ABSENT, ABSENT, None, id="neither"),
        pytest.param(ABSENT, FORBIDDEN, None, id="an operator of some namespaces sees none of the cluster"),
        pytest.param(FORBIDDEN, FOUND, ProfileKind.CLUSTER, id="an operator whose rights are older than profiles"),
    ],
)
def test_a_name_means(near: Answer, far: Answer, kind: ProfileKind | None) -> None:
    profile, _ = find({NEAR: near, FAR: far})
    assert (None if profile is None else (profile.kind, profile.name, profile.uid, profile.generation)) == (
        None if kind is None else (kind, "h100", "u", 3)
    )


@pytest.mark.parametrize("name", ["", "..", "a/b", "../secrets/x", "A", "%2e%2e", "x?watch=1", "-"])
def test_a_name_that_no_object_has_is_not_asked_for(name: str) -> None:
    assert find({}, name) == (None, [])


def test_an_api_server_that_does_not_answer_is_no_missing_profile() -> None:
    with pytest.raises(Retryable):
        find({NEAR: refusal_answer(503, "ServiceUnavailable"), FAR: FOUND})


def test_the_thread_of_a_review_waits_for_no_slow_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "REVIEW_SECONDS", 0.2)

    async def ask() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(NEAR, FOUND)
            reader = ProfileReader(api, asyncio.get_running_loop())
            found = await asyncio.to_thread(reader.find, "team", "h100")
            assert found is not None
            server.answering.clear()
            with pytest.raises(Retryable, match="was not read within"):
                await asyncio.to_thread(reader.find, "team", "h100")
            server.answering.set()

    asyncio.run(ask())
