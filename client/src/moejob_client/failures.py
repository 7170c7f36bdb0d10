"""Failures of a request about jobs: a sentence about each, with the fix, and a code that scripts can tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from moejob_client.errors import AlreadyExists, Conflict, Forbidden, NotFound, Retryable, Unauthorized


class RequestFailure(StrEnum):
    """The kind of a failure."""

    NO_JOB = "NoJob"
    NO_DEFINITION = "NoDefinition"
    OLD_DEFINITION = "OldDefinition"
    NO_RIGHTS = "NoRights"
    NO_SERVER = "NoServer"
    NO_CREDENTIALS = "NoCredentials"
    REFUSED = "Refused"
    TAKEN = "Taken"
    NO_LOG = "NoLog"
    NO_FILE = "NoFile"


class JobRequestError(Exception):
    """A request about jobs failed; the message is for the user."""

    def __init__(self, kind: RequestFailure, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@contextmanager
def explained_failures(action: str) -> Iterator[None]:
    """Turn an error of the HTTP layer into one sentence and a fix; `action` says what was tried."""
    try:
        yield
    except Unauthorized as error:
        message = f"the API server does not accept the credentials of this kubeconfig ({error}); log in again"
        raise JobRequestError(RequestFailure.NO_CREDENTIALS, message) from error
    except NotFound as error:
        raise _missing_object_error(str(error)) from error
    except AlreadyExists as error:
        message = f"{error}; choose another name, or delete that job first: `moejob cancel NAME`"
        raise JobRequestError(RequestFailure.TAKEN, message) from error
    except Conflict as error:
        raise JobRequestError(RequestFailure.REFUSED, f"{action}: {error}; try again") from error
    except Forbidden as error:
        raise _refusal_error(action, str(error)) from error
    except Retryable as error:
        message = f"{error}; check the address with `kubectl cluster-info`, and the context with --context"
        raise JobRequestError(RequestFailure.NO_SERVER, message) from error


def _missing_object_error(message: str) -> JobRequestError:
    # The API server names an object that is missing; of a path that it does not know it has no name.
    if '"' in message:
        return JobRequestError(
            RequestFailure.NO_JOB, f"{message}; `moejob get` lists the jobs of a namespace, -n names it"
        )
    text = "this cluster does not know MoETrainingJobs in the version that this moejob speaks"
    return JobRequestError(
        RequestFailure.NO_DEFINITION, f"{text}; install or upgrade the chart, which brings their CRD"
    )


def _refusal_error(action: str, message: str) -> JobRequestError:
    if "strict decoding error" in message or "unknown field" in message:
        text = f"the cluster's CRD is older than this moejob: {message}; upgrade the chart, or remove the field"
        return JobRequestError(RequestFailure.OLD_DEFINITION, text)
    if " cannot " in message and "is forbidden" in message:
        roles = "view or edit in this namespace, with what moejob-view and moejob-edit add"
        text = f"{action}: no rights: {message}; ask for the role {roles}"
        return JobRequestError(RequestFailure.NO_RIGHTS, text)
    return JobRequestError(RequestFailure.REFUSED, f"{action}: {message}")
