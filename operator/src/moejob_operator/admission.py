"""The validating webhook: the full check of a job, as an answer to the API server.

A server of our own and not kopf's: kopf makes one certificate for each process and writes the webhook configuration
itself, while here all replicas serve one certificate from a Secret, replaced while they run, and the chart owns the
configuration. What is judged here is judged again by the reconciler: a webhook can be down.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Protocol

from aiohttp import web

from moejob_api.documents import parse_job
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_operator.judging import Judgement, judgement

PATH = "/validate"
# What a denial is signed with.
HOOK = "validate.moejob.dev"
# Two objects of the most that etcd holds, as JSON in JSON.
BODY_BYTES = 4 * 1024 * 1024
# What is longer, the API server cuts off; all warnings together may have 4096.
_WARNING_CHARACTERS = 256
_WARNINGS = 15
_API = "admission.k8s.io/v1"


class AdmissionMetrics(Protocol):
    """Where answers are counted."""

    def judged(self, answer: str, seconds: float) -> None:
        """A review was answered with allowed, denied or unreadable."""


class NotAReview(ValueError):
    """The body is no AdmissionReview: whoever sent it is no API server."""


def verdict(raw: object) -> Judgement:
    """What is to be said about a job, as the reconciler will say it."""
    if not isinstance(raw, Mapping):
        return Judgement((Problem(Rule.FIELD, "", "is no object"),))
    try:
        return judgement(parse_job(raw).spec)
    except InvalidSpec as refused:
        return Judgement(refused.problems)


def answer(review: object) -> dict[str, Any]:
    """The AdmissionReview that answers one, whatever the job in it; NotAReview when there is nothing to answer."""
    request = review.get("request") if isinstance(review, Mapping) else None
    uid = request.get("uid") if isinstance(request, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(uid, str):
        raise NotAReview("the body is no AdmissionReview with a request and its uid")
    found = _judged(request)
    response: dict[str, Any] = {"uid": uid, "allowed": not found.problems}
    if found.problems:
        response["status"] = _status(found)
    warnings = [text[:_WARNING_CHARACTERS] for text in _warnings(found)][:_WARNINGS]
    if warnings:
        response["warnings"] = warnings
    return {"apiVersion": _API, "kind": "AdmissionReview", "response": response}


def _judged(request: Mapping[str, Any]) -> Judgement:
    old, new = request.get("oldObject"), request.get("object")
    if request.get("operation") not in ("CREATE", "UPDATE"):
        return Judgement()
    if not isinstance(old, Mapping):
        return verdict(new)
    # A job that is labelled, finished or being deleted may be of a time when other rules held.
    if isinstance(new, Mapping) and _has_same_spec(old, new):
        return Judgement()
    found = verdict(new)
    # Nor is the one who suspends such a job told to mend what was wrong with it before.
    known = set(verdict(old).problems) if found.problems else set()
    return replace(found, problems=tuple(problem for problem in found.problems if problem not in known))


def _has_same_spec(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "spec" in new and old.get("spec") == new["spec"]


def _status(found: Judgement) -> dict[str, Any]:
    causes = [
        {"reason": "FieldValueInvalid", "field": problem.path, "message": problem.message} for problem in found.problems
    ]
    # Not 422: kubectl would print the causes alone, and not say that a webhook refused.
    return {"code": 403, "reason": "Forbidden", "message": _message(found), "details": {"causes": causes}}


def _message(found: Judgement) -> str:
    text = "; ".join(map(str, found.problems))
    return f"{text}. What would be accepted: {'; '.join(found.suggestions)}" if found.suggestions else text


def _warnings(found: Judgement) -> Iterator[str]:
    if found.unseen is not None:
        yield f"spec.model.source: not checked against the model: {found.unseen}"
    yield from map(str, found.warnings)


# --- the server -----------------------------------------------------------------------------------------------------


def application(executor: Executor, metrics: AdmissionMetrics) -> web.Application:
    """POST /validate. The check runs in `executor`: it may take a while, and a Lease is renewed in this thread."""

    async def validate(request: web.Request) -> web.Response:
        started, said = time.monotonic(), "unreadable"
        try:
            body = await request.read()
            answered = await asyncio.get_running_loop().run_in_executor(executor, _answered, body)
            said = "allowed" if answered["response"]["allowed"] else "denied"
        except NotAReview as refused:
            raise web.HTTPBadRequest(text=str(refused)) from None
        finally:
            metrics.judged(said, time.monotonic() - started)
        return web.json_response(answered)

    app = web.Application(client_max_size=BODY_BYTES)
    app.add_routes([web.post(PATH, validate)])
    return app


def _answered(body: bytes) -> dict[str, Any]:
    try:
        review = json.loads(body)
    # ValueError is all of: not UTF-8, not JSON, and a number of more digits than Python reads.
    except (ValueError, RecursionError) as error:
        raise NotAReview(f"the body is not JSON: {error}") from None
    return answer(review)


def tls() -> ssl.SSLContext:
    """A server's context, still without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
