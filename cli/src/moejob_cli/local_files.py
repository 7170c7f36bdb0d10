"""Files and folders in a job that a run on this machine would read, and cannot: missing or forbidden ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from moejob_api.job import Spec
from moejob_api.job.model import is_place

_CLAIM = "pvc://"


def unreadable_sources(spec: Spec) -> Iterator[str]:
    """Yield a sentence for each file or folder of a job that a run on this machine could not read."""
    for field, source in _named_places(spec):
        if not source.startswith(_CLAIM):
            # A folder without config.json is no model; the message then names the missing file.
            has_config = source == spec.model.config_source
            yield from _access_problems(field, Path(source) / "config.json" if has_config else Path(source))


def claim_sources(spec: Spec) -> Iterator[str]:
    """Yield a sentence for each source of a job that lies on a claim of a cluster."""
    for field, source in _named_places(spec):
        if source.startswith(_CLAIM):
            yield f"{field}: {source} is a claim of a cluster; on this machine, name a path"


def _named_places(spec: Spec) -> Iterator[tuple[str, str]]:
    sources = [("spec.model.source", spec.model.source)]
    sources += [] if spec.model.config is None else [("spec.model.config", spec.model.config)]
    sources += [(f"spec.data.train[{number}].source", dataset.source) for number, dataset in enumerate(spec.data.train)]
    sources += [(f"spec.data.eval[{number}].source", each.source) for number, each in enumerate(spec.data.eval)]
    return ((field, source) for field, source in sources if is_place(source))


def _access_problems(field: str, needed: Path) -> Iterator[str]:
    try:
        needed.stat()
    except OSError as error:
        yield f"{field}: {needed} cannot be read on this machine ({error.strerror}); correct the path, or put it there"
        return
    # A folder needs x beside r: r lists the names in it, x lets them be opened.
    if not os.access(needed, os.R_OK | os.X_OK if needed.is_dir() else os.R_OK):
        yield f"{field}: {needed} may not be read by this user; change its permissions"
