"""Owns the one kubectl that the tests of documents ask; none of it needs a cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from textwrap import indent
from typing import Any

import pytest


@pytest.fixture(scope="session")
def kubectl() -> Callable[[str], Any]:
    """Return what kubectl reads where a text stands below `spec:`."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not on PATH")

    def read(text: str) -> Any:
        said = subprocess.run(
            [program, "annotate", "--local", "--filename", "-", "x=y", "--output", "json"],
            input=f"apiVersion: v1\nkind: K\nmetadata: {{name: a}}\nspec:\n{indent(text, '  ')}",
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(said.stdout)["spec"]

    return read
