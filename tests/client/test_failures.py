"""Failures of requests, as the API server words them, in one sentence with a fix."""

from __future__ import annotations

import pytest

from moejob_client.errors import AlreadyExists, Conflict, Forbidden, NotFound, Retryable, Unauthorized
from moejob_client.failures import JobRequestError, RequestFailure, explained_failures

UNKNOWN = 'strict decoding error: unknown field "spec.grpo"'
DENIED = 'moetrainingjobs.moejob.dev is forbidden: User "ann" cannot list resource "moetrainingjobs"'


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        pytest.param(
            NotFound('moetrainingjobs.moejob.dev "job" not found'), RequestFailure.NO_JOB, "moejob get", id="no job"
        ),
        pytest.param(NotFound("404 page not found"), RequestFailure.NO_DEFINITION, "install or upgrade", id="no CRD"),
        pytest.param(Forbidden(UNKNOWN), RequestFailure.OLD_DEFINITION, "older than this moejob", id="older CRD"),
        pytest.param(Forbidden(DENIED), RequestFailure.NO_RIGHTS, "moejob-view", id="no rights"),
        pytest.param(Forbidden("exceeded quota: jobs"), RequestFailure.REFUSED, "exceeded quota", id="quota"),
        pytest.param(Retryable("no route"), RequestFailure.NO_SERVER, "--context", id="no server"),
        pytest.param(Unauthorized("Unauthorized"), RequestFailure.NO_CREDENTIALS, "log in again", id="expired token"),
        pytest.param(AlreadyExists('"job" already exists'), RequestFailure.TAKEN, "another name", id="name is taken"),
        pytest.param(Conflict("changed"), RequestFailure.REFUSED, "try again", id="conflict"),
    ],
)
def test_a_failure_has_a_kind_and_a_fix(error: Exception, kind: RequestFailure, says: str) -> None:
    with pytest.raises(JobRequestError, match=says) as failure, explained_failures("cannot list jobs"):
        raise error
    assert failure.value.kind is kind
