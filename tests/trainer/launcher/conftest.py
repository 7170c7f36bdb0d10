"""A gang of launchers that ends with its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.launcher.launchers import Gang


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def make(**settings: Any) -> Gang:
        made.append(Gang(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
