"""Counts how often it is imported."""

import os
from pathlib import Path

from own_rewards import hangs_at_bad  # type: ignore[import-not-found]  # noqa: F401

with Path(os.environ["IMPORTS"]).open("a") as file:
    file.write("imported\n")
