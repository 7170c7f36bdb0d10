"""Owns the ranks that tests of layers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainer.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(1)
