"""A limit of a container bounds the threads of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from moejob_trainer.runtime.cores import count_cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 8, id="no cgroups"),
        pytest.param({"cpu.max": "max 100000\n"}, 8, id="no limit"),
        pytest.param({"cpu.max": "400000 100000\n"}, 4, id="four cores"),
        pytest.param({"cpu.max": "150000 100000\n"}, 1, id="one and a half"),
        pytest.param({"cpu.max": "20000 100000\n"}, 1, id="a part of one"),
        pytest.param({"cpu.max": "9900000 100000\n"}, 8, id="more than there are"),
        pytest.param({"cpu.max": "nonsense"}, 8, id="nonsense"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8, id="version 1, no limit"
        ),
        pytest.param({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2, id="version 1"),
    ],
)
def test_cores_are_those_of_the_limit(
    files: Mapping[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_cores(tmp_path) == expected
