"""Settings that a job leaves open follow from the rest of the job."""

from __future__ import annotations

from typing import Any

import pytest

from builders import spec
from moejob_api.derived import mismatch_correction
from moejob_api.job.grpo import ImportanceLevel, MismatchCorrection, MismatchMode

TRUNCATED = MismatchCorrection(level=ImportanceLevel.TOKEN, mode=MismatchMode.TRUNCATE, maximum=2.0)
MASKED = MismatchCorrection(level=ImportanceLevel.SEQUENCE, mode=MismatchMode.MASK, maximum=3.0, minimum=0.5)
GIVEN = {"level": "Sequence", "mode": "Mask", "maximum": 3.0, "minimum": 0.5}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, None, id="answers of the newest weights need no correction"),
        pytest.param({"rollout": {"staleness": 1}}, TRUNCATED, id="answers of older weights are corrected"),
        pytest.param({"mismatch": GIVEN}, MASKED, id="the job's own correction counts"),
        pytest.param({"mismatch": GIVEN, "rollout": {"staleness": 4}}, MASKED, id="also for answers of older weights"),
    ],
)
def test_answers_are_corrected_as_their_weights_need(
    settings: dict[str, Any], expected: MismatchCorrection | None
) -> None:
    grpo = spec(method="GRPO", grpo=settings).grpo
    assert grpo is not None
    assert mismatch_correction(grpo) == expected
