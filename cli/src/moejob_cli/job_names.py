"""Names that commands take for jobs of a cluster, where a folder of this machine could be meant too."""

from __future__ import annotations

import re
from pathlib import Path

from moejob_client.job_view import LATEST

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def is_job_name(name: Path) -> bool:
    """Return whether an argument names a job: no path of this machine has that name, and an object could."""
    text = str(name)
    return text == LATEST or (not name.exists() and _NAME.fullmatch(text) is not None)
