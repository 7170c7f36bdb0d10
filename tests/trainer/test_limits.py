"""What the trainer does not do is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from builders import spec
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.limits import refuse_what_is_missing


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        pytest.param({"method": "GRPO"}, "method GRPO", id="GRPO"),
    ],
)
def test_what_is_missing_is_refused(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(BadConfiguration, match=named):
        refuse_what_is_missing(spec(**sections))


def test_a_job_of_what_there_is_goes_on() -> None:
    refuse_what_is_missing(spec())
