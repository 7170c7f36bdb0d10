"""The checks of `helm test` on an installation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
import pytest

from moejob_api.problems import Rule
from moejob_operator.admission.review import validate_raw_job
from moejob_operator.installed import Installation, installation_checks, lasting_problem
from stand_in_api import Answer, StandInServer, refusal_answer, serve_stand_in, stored_object

READY, LEASE = "GET /readyz", "GET /apis/coordination.k8s.io/v1/namespaces/home/leases/moejob-operator"
JOBS = "POST /apis/moejob.dev/v1alpha1/namespaces/team/moetrainingjobs"
ACCEPTED: Answer = (201, {"kind": "PartialObjectMetadata"})
DENIED = refusal_answer(
    403, "Forbidden", 'admission webhook "validate.moejob.dev" denied the request: tensor 3 does not'
)


def lease(version: int, holder: str = "replica-1") -> Answer:
    return 200, stored_object("Lease", "moejob-operator", version, spec={"holderIdentity": holder})


WELL: Mapping[str, tuple[Answer, ...]] = {
    READY: ((200, "ok\n"),),
    LEASE: (lease(1), lease(2)),
    JOBS: (ACCEPTED, DENIED),
}


def found(answers: Mapping[str, tuple[Answer, ...]], *, webhook: bool = True) -> tuple[dict[str, str], StandInServer]:
    """Return what is wrong, by what should be so, and what was asked."""

    async def story() -> tuple[dict[str, str], StandInServer]:
        async with serve_stand_in() as (server, api), aiohttp.ClientSession() as http:
            for asked, said in {**WELL, **answers}.items():
                server.set_answers(asked, *said)
            installation = Installation(url=server.url, namespace="team", own_namespace="home", webhook=webhook)
            until = asyncio.get_running_loop().time() + 1.5
            made = {
                check.claim: await lasting_problem(check, until)
                for check in installation_checks(installation, api, http)
            }
            return {claim: problem for claim, problem in made.items() if problem is not None}, server

    return asyncio.run(story())


def test_of_an_installation_that_works_nothing_is_wrong_and_nothing_is_kept() -> None:
    problems, server = found({})
    assert problems == {}
    tried = [asked for asked in server.requests if asked.method != "GET"]
    assert [asked.query["dryRun"] for asked in tried] == ["All", "All"]
    right, wrong = (validate_raw_job(asked.body) for asked in tried)
    assert (right.problems, right.warnings) == ((), ())
    assert Rule.HEADS in {problem.rule for problem in wrong.problems}


@pytest.mark.parametrize(
    ("answers", "claim", "problem"),
    [
        pytest.param(
            {READY: ((503, "webhook: no certificate\n"),)}, "is ready", "webhook: no certificate", id="not ready"
        ),
        pytest.param({LEASE: (refusal_answer(404, "NotFound"),)}, "leads", "nobody holds the Lease", id="no Lease"),
        pytest.param({LEASE: (lease(1, ""),)}, "leads", "nobody holds the Lease", id="a Lease that was given up"),
        pytest.param({LEASE: (lease(1),)}, "leads", "replica-1 holds", id="a leader that died"),
        pytest.param(
            {JOBS: (refusal_answer(404, "NotFound", "no such kind"),)},
            "is accepted",
            "no such kind",
            id="no definition",
        ),
        pytest.param({JOBS: (ACCEPTED,)}, "is denied", "it was accepted", id="a webhook that is not reached"),
        pytest.param(
            {JOBS: (ACCEPTED, refusal_answer(403, "Forbidden", "user cannot create"))},
            "denied",
            "user cannot",
            id="no right",
        ),
    ],
)
def test_what_does_not_work_is_named_with_the_reason(
    answers: dict[str, tuple[Answer, ...]], claim: str, problem: str
) -> None:
    problems, _ = found(answers)
    [(found_claim, found_problem)] = [(key, text) for key, text in problems.items() if claim in key]
    assert found_claim
    assert problem in found_problem


def test_without_a_webhook_no_denial_is_asked_for() -> None:
    problems, server = found({JOBS: (ACCEPTED,)}, webhook=False)
    assert problems == {}
    assert server.calls.count(JOBS) == 1


def test_an_operator_that_does_not_answer_is_not_ready() -> None:
    async def story() -> str | None:
        async with serve_stand_in() as (_, api), aiohttp.ClientSession() as http:
            nobody = Installation(url="http://127.0.0.1:1", namespace="team", own_namespace="home")
            return await lasting_problem(installation_checks(nobody, api, http)[0], asyncio.get_running_loop().time())

    assert "127.0.0.1" in (asyncio.run(story()) or "")
