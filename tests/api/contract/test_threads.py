"""Threads that wait give up their cores, unless the environment says otherwise."""

from __future__ import annotations

import pytest

from moejob_api.contract.threads import waiting_variables


@pytest.mark.parametrize(
    ("environ", "variables"),
    [
        ({"OMP_NUM_THREADS": "2"}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {}),
    ],
)
def test_what_the_environment_says_of_waiting_decides(environ: dict[str, str], variables: dict[str, str]) -> None:
    assert waiting_variables(environ) == variables
