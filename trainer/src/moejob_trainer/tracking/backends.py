"""The interface of a tracker backend, and the facts of the run that it receives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moejob_api.job import Spec
from moejob_trainer.rewards.service import redacted_url
from moejob_trainer.runtime.fencing import FenceToken
from moejob_trainer.runtime.redaction import REDACTED, Redaction, is_secret_name


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The facts of a run that trackers receive."""

    job: str
    # The same in every attempt, so each attempt resumes the tracker's run.
    uid: str
    spec: Spec
    folder: Path
    token: FenceToken

    def describe_spec(self) -> dict[str, Any]:
        """Return the job's fields as others may see them: servers of trackers are read by more people than jobs are."""
        fields: dict[str, Any] = self.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {name: _hide_secrets(value, Redaction(os.environ)) for name, value in fields.items()}


def _hide_secrets(value: Any, redaction: Redaction) -> Any:
    """Return a value without queries and users of URLs, values of variables with a secret's name, and known secrets."""
    if isinstance(value, list):
        return [_hide_secrets(part, redaction) for part in value]
    if isinstance(value, dict):
        is_secret = isinstance(value.get("value"), str) and is_secret_name(str(value.get("name", "")))
        parts = {name: _hide_secrets(part, redaction) for name, part in value.items()}
        return parts | ({"value": REDACTED} if is_secret else {})
    if not isinstance(value, str):
        return value
    is_url = value.startswith(("http://", "https://"))
    return redaction.redact_text(redacted_url(value) if is_url else value)


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The metrics of one step. All values are finite."""

    step: int
    # Seconds since the epoch.
    time: float
    values: Mapping[str, float]


class TrackerBackend(Protocol):
    """A receiver of numbers. It may raise any exception and take any time: neither reaches the training loop."""

    def write(self, numbers: StepNumbers) -> None:
        """Send the numbers of a step. After a restart, steps come a second time."""

    def close(self, *, has_failed: bool) -> None:
        """Send the rest, and report the end of the run."""
