"""A run that ends with its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**sections: Any) -> Run:
        made.append(Run(tmp_path, sections))
        return made[-1]

    yield make
    for one in made:
        one.close()
