"""Failures of a made-up answer, which show a reward that cannot work before engines start."""

from __future__ import annotations

import pytest

from moejob_api.job.grpo import RewardFailure
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.rewards.completion import FailureKind, RewardFailed
from moejob_trainer.rewards.first_completion import tolerated_failures

CERTAIN = ("IMPORT", "RECORD", "WRONG_TYPE", "WRONG_COUNT", "REFUSED")


@pytest.mark.parametrize("kind", FailureKind)
def test_what_fails_for_every_answer_ends_the_run_and_the_rest_is_said(kind: FailureKind) -> None:
    failures = {"judge": RewardFailed(kind, "the reason")}
    if kind.name in CERTAIN:
        with pytest.raises(BadConfiguration, match="reward judge failed for a made-up answer"):
            tolerated_failures(failures, RewardFailure.DROP_GROUP)
    elif kind is FailureKind.AWAY:
        with pytest.raises(TransientFailure, match="service away"):
            tolerated_failures(failures, RewardFailure.DROP_GROUP)
    else:
        (line,) = tolerated_failures(failures, RewardFailure.DROP_GROUP)
        assert "groups with such answers will be left out" in line
        with pytest.raises(BadConfiguration, match=r"grpo\.rewardFailure is Stop"):
            tolerated_failures(failures, RewardFailure.STOP)
