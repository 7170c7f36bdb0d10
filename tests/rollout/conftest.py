"""Engines that several tests share: a start takes 10 s of a core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import Engine
from rollout.references import lay_out

Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts engines of a family, and ends them with the module."""
    started: list[Engine] = []

    def engine(family: str, sync: str = "Disk", **sections: Any) -> Engine:
        folder = tmp_path_factory.mktemp(family)
        lay_out(family, folder / "engine-model")
        started.append(Engine(folder, log_of(folder), **_job(sync, **sections)))
        return started[-1]

    yield engine
    for one in started:
        if one.workers():
            one.kill()


def log_of(folder: Path) -> Path:
    return folder / "engine.log"


def _job(sync: str, tensor: int = 1, **grpo: Any) -> dict[str, Any]:
    rollout = {"placement": "Separate", "sync": sync, "tensor": tensor}
    return {
        "model": {"dtype": "float32"},
        "data": {"maxLength": 128},
        "grpo": {"maxNewTokens": 64, "rollout": rollout} | grpo,
    }
