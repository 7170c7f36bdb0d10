"""Bars of the hub's client report the share of files, and write nothing."""

from __future__ import annotations

import pytest
from huggingface_hub.utils.tqdm import hf_thread_map

from moejob_trainer.data.hub_bars import reporting_bars


def test_each_file_that_is_there_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    shares: list[tuple[int, int]] = []
    bars = reporting_bars(lambda done, total: shares.append((done, total)))
    hf_thread_map(str, range(4), tqdm_class=bars, desc="Fetching 4 files", max_workers=2)
    assert shares == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert capfd.readouterr() == ("", "")


def test_bytes_are_not_reported_for_their_sum_grows(capfd: pytest.CaptureFixture[str]) -> None:
    shares: list[tuple[int, int]] = []
    with reporting_bars(lambda done, total: shares.append((done, total)))(total=100, unit="B", unit_scale=True) as bar:
        bar.update(50)
    assert shares == []
    assert capfd.readouterr() == ("", "")
