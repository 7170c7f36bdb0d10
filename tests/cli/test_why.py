"""`moejob why` on what kubectl prints: one obstacle a job, exit codes for scripts, one sentence for a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diagnosis_bodies import GPU, claim, job, node, pod, unschedulable

FULL = (pod(0, unschedulable(f"0/2 nodes are available: 2 Insufficient {GPU}.")), node(), claim(phase="Bound"))
TRAINING = job("Running", ("AllPodsRun", "every trainer pod runs"), metadata={"name": "other"})


def explain(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `moejob why` as a process of its own."""
    command = [sys.executable, "-m", "moejob_cli", "why", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=False, timeout=300, env=os.environ
    )


def kubectl_list(*objects: object) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


def test_each_job_of_a_list_has_its_obstacle() -> None:
    answer = explain("-", stdin=kubectl_list(job(), TRAINING, *FULL))
    assert (answer.returncode, answer.stderr) == (1, "")
    assert answer.stdout.splitlines() == [
        "team/job: Pending, InsufficientGpus since 2030-01-01T00:10:00Z",
        f"  what  job-trainer-0-00000 fits no node: {GPU} is used up",
        "  next  the scheduler places the pods as soon as a node fits",
        "  fix   wait for GPUs, add nodes, or choose a layout of fewer GPUs: `moejob plan --auto --gpus N`",
        "team/other: Running, nothing is in its way",
    ]


def test_scripts_read_the_same_fields_as_in_the_status(tmp_path: Path) -> None:
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all([job(), *FULL]))
    [entry] = json.loads(explain(str(file), "-o", "json").stdout)["jobs"]
    assert entry["phase"] == "Pending"
    assert set(entry["why"]) == {"blocker", "since", "message", "next", "fix"}


def test_a_job_without_an_obstacle_exits_0() -> None:
    assert explain("-", stdin=kubectl_list(TRAINING)).returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(kubectl_list(*FULL), "there is no MoETrainingJob in the input", id="no job"),
        pytest.param("a: [", "a bracket is closed that was never opened", id="no YAML"),
        pytest.param("", "there is no MoETrainingJob in the input", id="nothing"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str, message: str) -> None:
    answer = explain("-", stdin=text)
    assert answer.returncode == 2
    assert message in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_words_of_a_cluster_cannot_move_the_cursor() -> None:
    hostile = job(running=("CreationRefused", "\x1b[2Jno\u202e"))
    assert "\x1b" not in explain("-", stdin=kubectl_list(hostile)).stdout
