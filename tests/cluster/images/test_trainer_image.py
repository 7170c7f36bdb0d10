"""The trainer's image, given what the operator's manifest gives: a whole run, and what is left of it on the volume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from builders import merged
from cluster.images.conftest import Contains
from confined import Container
from golden_manifests import created
from image_builds.recipes import ROOT
from moejob_api.contract import Environment, LastWord, Outcome, RunFile
from moejob_api.documents import read_file

pytestmark = pytest.mark.cluster

# Of a user and group that no image knows more about.
USER = 65532
# A minute where nothing else runs.
SECONDS = 600


def pod(steps: int) -> dict[str, Any]:
    """The pod of the tiny example, as the operator makes it."""
    job = read_file(ROOT / "examples" / "tiny-sft.yaml")
    shorter = {"training": {"maxSteps": steps, "evalEvery": None}, "checkpoint": {"everySteps": steps}}
    raw = {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "tiny-sft", "namespace": "team", "uid": "6f1c", "generation": 1},
        "spec": merged(job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True), shorter),
    }
    [found] = [manifest for manifest in created(raw, frozenset()) if manifest["kind"] == "Pod"]
    return found


def volume(folder: Path) -> Path:
    """A claim's volume, as the kubelet gives it to the group of the pod."""
    made = folder / "volume"
    made.mkdir()
    os.chown(made, 0, USER)
    made.chmod(0o2775)
    return made


def test_two_ranks_train_and_export(container: Contains, tmp_path: Path) -> None:
    manifest, storage = pod(steps=6), volume(tmp_path)
    [trainer] = manifest["spec"]["containers"]
    assert "command" not in trainer, "the image says what runs"
    environment = {variable["name"]: variable["value"].replace("$$", "$") for variable in trainer["env"]}
    hosts = (environment[Environment.HOST],)
    mounted = {"/moejob": storage}
    made = container("trainer-cpu", Container((), environment | {"OMP_NUM_THREADS": "1"}, mounted, hosts))
    done = made.run(SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert LastWord.model_validate_json(made.last_word.read_text()).outcome is Outcome.COMPLETED
    run = Path(str(storage) + environment[Environment.RUN_FOLDER].removeprefix("/moejob"))
    assert [json.loads(line)["step"] for line in (run / RunFile.STEPS).read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    assert (run / RunFile.EXPORT / "config.json").exists()
    assert {file.stat().st_uid for file in run.rglob("*")} == {USER}


def test_it_knows_who_it_runs_as(container: Contains) -> None:
    asks = "import getpass, os; print(getpass.getuser(), os.getuid(), os.path.expanduser('~'))"
    done = container("trainer-cpu", Container(("python", "-c", asks))).run(seconds=30)
    assert (done.stdout, done.returncode) == ("moejob 65532 /tmp\n", 0), done.stderr
