"""The trainer's image, given what the operator's manifest gives: a whole run, and what is left of it on the volume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.images.conftest import Contains
from cluster.images.tiny import USER, trained
from confined import Container
from moejob_api.contract.pods import RunFile

pytestmark = pytest.mark.cluster


def test_two_ranks_train_and_export(container: Contains, tmp_path: Path) -> None:
    run = trained(container, tmp_path, steps=6)
    assert [json.loads(line)["step"] for line in (run / RunFile.STEPS).read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    assert (run / RunFile.EXPORT / "config.json").exists()
    assert {file.stat().st_uid for file in run.rglob("*")} == {USER}


def test_it_knows_who_it_runs_as(container: Contains) -> None:
    asks = "import getpass, os; print(getpass.getuser(), os.getuid(), os.path.expanduser('~'))"
    done = container("trainer-cpu", Container(("python", "-c", asks))).run(seconds=300)
    assert (done.stdout, done.returncode) == ("moejob 65532 /tmp\n", 0), done.stderr
