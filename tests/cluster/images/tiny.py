"""The tiny example in the trainer's image: its pod as the operator makes it, and the run that is left."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builders import merge_sections
from confined import ConfinedContainer, Container
from golden_manifests import create_manifests
from image_builds.recipes import ROOT
from moejob_api.contract.pods import Environment, PodOutcome, TerminationMessage
from moejob_api.documents import read_file

# Of a user and group that no image knows more about.
USER = 65532
# A minute where nothing else runs.
SECONDS = 600


def trained(container: Callable[[str, Container], ConfinedContainer], folder: Path, steps: int) -> Path:
    """The folder of a whole run in the image of the trainer for CPUs."""
    manifest, storage = _pod(steps), _volume(folder)
    [trainer] = manifest["spec"]["containers"]
    assert "command" not in trainer, "the image says what runs"
    environment = {variable["name"]: _value(variable) for variable in trainer["env"]}
    hosts = (environment[Environment.HOST],)
    made = container("trainer-cpu", Container((), environment | {"OMP_NUM_THREADS": "1"}, {"/moejob": storage}, hosts))
    done = made.run(SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert TerminationMessage.model_validate_json(made.last_word.read_text()).outcome is PodOutcome.COMPLETED
    return Path(str(storage) + environment[Environment.RUN_FOLDER].removeprefix("/moejob"))


def _value(variable: dict[str, Any]) -> str:
    """The value that the kubelet gives a variable: the pod's node, one of the job's Secret, or that of the manifest."""
    if variable.get("valueFrom") == {"fieldRef": {"fieldPath": "spec.nodeName"}}:
        return "node-1"
    if "valueFrom" in variable:
        assert variable["valueFrom"].keys() == {"secretKeyRef"}, variable
        return secrets.token_hex(32)
    value: str = variable["value"]
    return value.replace("$$", "$")


def _pod(steps: int) -> dict[str, Any]:
    """The pod of the tiny example, as the operator makes it."""
    job = read_file(ROOT / "examples" / "tiny-sft.yaml")
    shorter = {"training": {"maxSteps": steps, "evalEvery": None}, "checkpoint": {"everySteps": steps}}
    raw = {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "tiny-sft", "namespace": "team", "uid": "6f1c", "generation": 1},
        "spec": merge_sections(job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True), shorter),
    }
    [found] = [manifest for manifest in create_manifests(raw, frozenset()) if manifest["kind"] == "Pod"]
    return found


def _volume(folder: Path) -> Path:
    """A claim's volume, as the kubelet gives it to the group of the pod."""
    made = folder / "volume"
    made.mkdir()
    os.chown(made, 0, USER)
    made.chmod(0o2775)
    return made
