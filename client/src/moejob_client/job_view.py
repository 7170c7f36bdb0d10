"""A job as the API server has it, and a change of it. No verb waits for models that it does not need."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_api.job.phase import Phase

if TYPE_CHECKING:
    from moejob_api.job.status import Status

# `@latest` names the job of the namespace that was created last: no name of an object begins with an @.
LATEST = "@latest"


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the API server has it."""

    body: Raw

    @property
    def status(self) -> Status:
        """Return its status; fields that this version cannot read count as absent."""
        from moejob_api.diagnosis.reading import read_status  # noqa: PLC0415 no verb waits for models it does not need

        return read_status(self.body.get("status"))

    @property
    def name(self) -> str:
        """Return its name."""
        return api_bodies.as_text(api_bodies.object_metadata(self.body).get("name"))

    @property
    def namespace(self) -> str:
        """Return its namespace."""
        return api_bodies.as_text(api_bodies.object_metadata(self.body).get("namespace"))

    @property
    def uid(self) -> str:
        """Return its UID: a job that is created again under the same name has another."""
        return api_bodies.as_text(api_bodies.object_metadata(self.body).get("uid"))

    @property
    def created_at(self) -> datetime | None:
        """Return when it was created."""
        return api_bodies.as_time(api_bodies.object_metadata(self.body).get("creationTimestamp"))

    @property
    def phase(self) -> Phase | None:
        """Return its phase; None before the operator has seen it."""
        text = self.status_text("phase")
        return Phase(text) if text in set(Phase) else None

    def status_text(self, *path: str) -> str:
        """Return a text of the status; an empty one when it is absent."""
        value: object = self.body.get("status")
        for key in path:
            value = api_bodies.as_mapping(value).get(key)
        return api_bodies.as_text(value)

    @property
    def ranks_per_pod(self) -> int | None:
        """Return the ranks of one trainer pod; None before the operator has laid the job out."""
        layout = api_bodies.as_mapping(api_bodies.as_mapping(self.body.get("status")).get("layout"))
        return api_bodies.as_integer(layout.get("gpusPerPod")) or None

    @property
    def has_spares(self) -> bool:
        """Return whether spares may have taken places: then the index of a pod does not say its ranks."""
        layout = api_bodies.as_mapping(api_bodies.as_mapping(self.body.get("status")).get("layout"))
        return bool(api_bodies.as_integer(layout.get("spares")))

    @property
    def is_finished(self) -> bool:
        """Return whether nothing more will happen to it."""
        return self.phase is not None and self.phase.is_finished


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A job as a watch reports it; `is_gone`: it was deleted."""

    job: JobView
    is_gone: bool = False
