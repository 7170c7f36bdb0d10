"""What a job may ask for and this trainer does not do: refused by name, never left out silently."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job import Spec
from moejob_api.job.job import Method
from moejob_trainer.errors import BadConfiguration


def refuse_what_is_missing(spec: Spec) -> None:
    """Raises BadConfiguration for what the job asks for in vain."""
    missing = list(_missing(spec))
    if missing:
        raise BadConfiguration("; ".join(missing))


def _missing(spec: Spec) -> Iterator[str]:
    if spec.method is Method.GRPO:
        yield "method GRPO cannot be trained by this version; use SFT"
