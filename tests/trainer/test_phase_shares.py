"""Long phases of a real run report rising shares: the load of a real mixture, its check, data, restore and export."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moejob_api.contract.pods import RunPhase
from real_models import MIXTRAL, find_real_model
from trainer import random_model
from trainer.runs import Runs, StartedRanks

DOCUMENTS = 6_000


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path / "volume")
    yield started
    started.close()


def watch_shares(started: StartedRanks) -> dict[RunPhase, list[float]]:
    """Return the shares that rank 0 reports in each phase, each once, until the run has ended."""
    shares: dict[RunPhase, list[float]] = {}
    is_running = True
    while is_running:
        is_running = started.is_running()
        row = started.board.read()[0]
        if row.phase is not None and row.phase_share is not None:
            of_phase = shares.setdefault(row.phase, [])
            if of_phase[-1:] != [row.phase_share]:
                of_phase.append(row.phase_share)
        time.sleep(0.001)
    assert started.await_exit_codes() == [0] * len(started.processes), started.read_log()
    return shares


def assert_rise(shares: list[float], fewest: int) -> None:
    assert len(shares) >= fewest
    assert all(0 <= first < second <= 1 for first, second in pairwise(shares))


def write_texts(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": f"Line {number} of a text."}) + "\n" for number in range(DOCUMENTS)))


def test_a_real_mixture_reports_its_load_its_check_and_its_data(runs: Runs) -> None:
    data = runs.volume / "texts.jsonl"
    write_texts(data)
    # With adapters, for less memory: the weights are loaded all the same.
    started = runs.start(
        model={"source": str(find_real_model(MIXTRAL)), "dtype": "bfloat16"},
        data={"train": [{"source": str(data), "format": "Text"}], "maxLength": 32},
        training={"maxSteps": 1, "globalBatchSize": 2, "lora": {"rank": 2}},
    )
    shares = watch_shares(started)
    assert_rise(shares[RunPhase.RESTORING], fewest=20)
    assert_rise(shares[RunPhase.CHECKING], fewest=5)
    assert_rise(shares[RunPhase.PREPARING_DATA], fewest=5)


def test_an_export_and_a_restore_report_how_much_is_done(runs: Runs) -> None:
    random_model.write(runs.volume / "model")
    sections: dict[str, Any] = {"model": {"source": str(runs.volume / "model")}}
    runs.run_to_end(**sections, training={"maxSteps": 1})
    # The checkpoint of the first start is all that this one loads.
    exported = {"everySteps": 1, "exportHuggingFace": True}
    shares = watch_shares(runs.start(**sections, attempt=2, training={"maxSteps": 2}, checkpoint=exported))
    assert_rise(shares[RunPhase.RESTORING], fewest=10)
    assert_rise(shares[RunPhase.EXPORTING], fewest=10)
