"""A status is read as far as this version understands it, in a bounded time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from moejob_api.diagnosis.reading import read_status

GOOD = {"type": "Accepted", "status": "True", "reason": "Planned", "lastTransitionTime": "2030-01-01T00:00:00Z"}


def test_unreadable_items_go_and_their_neighbours_stay() -> None:
    conditions = [{"type": 7}, GOOD, {"type": []}, GOOD | {"type": "Running"}, {}]
    read = read_status({"attempt": 3, "conditions": conditions})
    assert [condition.type.value for condition in read.conditions] == ["Accepted", "Running"]
    assert read.attempt == 3


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"attempt": 3, "conditions": [{}] * 100_000}, id="empty conditions"),
        pytest.param({"attempt": 3, "conditions": [GOOD | {"type": "?"}] * 100_000}, id="conditions of no type"),
        pytest.param({"attempt": 3, "restarts": {"ladder": {"replacing": [{}] * 100_000}}}, id="entries of a ladder"),
        pytest.param({"attempt": 3, "why": {str(key): [] for key in range(100_000)}}, id="fields"),
    ],
)
def test_a_status_that_another_client_has_filled_is_read_at_once(status: dict[str, Any]) -> None:
    started = time.process_time()
    assert read_status(status).attempt == 3
    assert time.process_time() - started < 0.25
