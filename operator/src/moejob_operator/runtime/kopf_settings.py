"""kopf as this operator uses it: it reports events, keeps nothing and writes nothing."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import kopf

from moejob_client.api_client import PAGE
from moejob_operator.runtime.job_watch import INACTIVITY_SECONDS


def configure_kopf(settings: kopf.OperatorSettings, reviewers: Executor, server: kopf.WebhookServerProtocol) -> None:
    """Set kopf up. Synchronous handlers run in `reviewers`; the only one is the check of a job."""
    # To see definitions and namespaces come and go, kopf would need the right to watch all of them.
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.posting.enabled = False
    # Deadlines and pauses are those of moejob_operator.runtime.kopf_session.
    settings.networking.request_timeout = None
    settings.networking.error_backoffs = ()
    settings.watching.inactivity_timeout = INACTIVITY_SECONDS
    settings.watching.chunk_size = PAGE
    settings.execution.executor = reviewers
    settings.admission.server = server
    settings.persistence.diffbase_storage = NoDiffs()
    settings.persistence.progress_storage = NoProgress()


class NoDiffs(kopf.DiffBaseStorage):
    """Keep no last-seen state: no handler asks what has changed, and comparing costs more than reconciling."""

    def fetch(self, *, body: Any) -> None:
        """Know no earlier state."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:  # noqa: ARG002
        """Describe nothing."""
        return {}

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Write no last-seen state."""


class NoProgress(kopf.ProgressStorage):
    """Keep no progress of handlers: none is tried again by kopf."""

    def fetch(self, *, key: Any, body: Any) -> None:
        """Know no progress."""

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        """Write no progress."""

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        """Remove no progress: none was written."""

    def touch(self, *, body: Any, patch: Any, value: Any) -> None:
        """Leave the object untouched."""

    def clear(self, *, essence: Any) -> Any:
        """Return the essence as it is: it holds no progress."""
        return essence
