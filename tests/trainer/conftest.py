"""Owns the ranks that all tests share: the fork server they come from keeps what it was first asked to import."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Libraries read these when they are imported, here and in all that tests start. What tests compute is too small for
# several threads, which on busy cores spend ten times the work on waiting for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# Nothing may wait for a hub that is out of reach.
os.environ["HF_HUB_OFFLINE"] = "1"

from trainer.worlds import Worlds

# Files of few tests that take minutes each, for engines start in them. By the number of their tests they would come
# last, when one worker would be alone with them.
_BEGUN_FIRST = (
    "test_grpo_runs.py",
    "test_transports.py",
    "test_real_engines.py",
    "test_replayed_runs.py",
    "test_recorded_steps.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _BEGUN_FIRST)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(8, tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()
