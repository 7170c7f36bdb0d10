"""The troubleshooting page knows every reason that a job can show."""

from __future__ import annotations

from pathlib import Path

import pytest

from moejob_api.diagnosis.blockers import Blocker
from moejob_api.recovery.restarts import FailureCause
from moejob_operator.planning.decision import Reason

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# Nothing is wrong with these.
USUAL = {
    Reason.ALL_PODS_RUN,
    Reason.PROFILE_TAKEN,
    Reason.POD_ENDING,
    Reason.SUSPENDED,
    Reason.COMPLETED,
    Reason.STOPPED_EARLY,
}


@pytest.mark.parametrize(
    "reason", sorted({*map(str, FailureCause), *map(str, Blocker), *map(str, set(Reason) - USUAL)})
)
def test_a_reason_is_explained(reason: str) -> None:
    assert f"`{reason}`" in PAGE
