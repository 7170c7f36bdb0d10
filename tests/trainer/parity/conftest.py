"""Owns the ranks that cells share, and one reference for each family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from moejob_api.models.shape import Family
from trainer.parity.cells import Steps, write_reference
from trainer.worlds import Worlds

Reference = Callable[[Family], tuple[Path, Steps]]


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(8, tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The folder of a family's reference, and what it measured; written when first asked for."""
    torch.set_num_threads(1)

    @cache
    def written(family: Family) -> tuple[Path, Steps]:
        folder = tmp_path_factory.mktemp(family)
        return folder, write_reference(family, folder)

    return written
