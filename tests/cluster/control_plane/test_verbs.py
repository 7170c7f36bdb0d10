"""The verbs of `moejob` before a real API server: processes with a kubeconfig, exit codes, one sentence a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.control_plane import jobs
from cluster.control_plane.kubeconfigs import Server, write_for_token
from cluster.control_plane.plane import ControlPlane
from cluster.waiting import until
from documented import ROOT
from moejob_client.client import Client
from moejob_client.failures import JobRequestError

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("definition")]

TINY = ROOT / "examples" / "tiny-sft.yaml"
NAMES = ("get", "watch", "why", "logs", "steps", "samples", "stacks", "top", "open", "suspend", "resume", "cancel")
VERBS = (
    *([verb, "job"] for verb in NAMES),
    ["compare", "job", "other"],
    ["cp", "job", "export", "new"],
    ["export", "job", "--out", "new"],
)
SUBMIT = ["submit", str(TINY)]
SWEEP = [*SUBMIT, "--set", "training.optimizer.learningRate=0.001,0.003"]
ALL = (*VERBS, SUBMIT, SWEEP)
DOCTOR = ["doctor"]


def name_verb(verb: list[str]) -> str:
    """The word that a test of this verb is found by."""
    return "sweep" if verb is SWEEP else verb[0]


def start_verb(kubeconfig: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
    return subprocess.Popen(
        [sys.executable, "-m", "moejob_cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"KUBECONFIG": str(kubeconfig)},
    )


def run_verb(kubeconfig: Path, *arguments: str) -> tuple[int, str, str]:
    process = start_verb(kubeconfig, *arguments)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def write_status(plane: ControlPlane, namespace: str, name: str, **status: object) -> None:
    plane.api.merge(jobs.path(namespace, name, part="status"), {"status": status})


def test_a_job_is_submitted_listed_stopped_continued_and_deleted(control_plane: ControlPlane, namespace: str) -> None:
    at = f"--namespace={namespace}"
    config = control_plane.kubeconfig
    code, output, _ = run_verb(config, *SUBMIT, "--set", "training.maxSteps=7", at)
    assert (code, output.startswith(f"{namespace}/tiny-sft: created (")) == (0, True)
    assert control_plane.api.get(jobs.path(namespace, "tiny-sft"))["spec"]["training"]["maxSteps"] == 7
    assert run_verb(config, "suspend", "@latest", at)[:2] == (0, f"{namespace}/tiny-sft: suspended\n")
    assert control_plane.api.get(jobs.path(namespace, "tiny-sft"))["spec"]["lifecycle"]["suspend"] is True
    assert run_verb(config, "resume", "tiny-sft", at)[0] == 0
    assert control_plane.api.get(jobs.path(namespace, "tiny-sft"))["spec"]["lifecycle"]["suspend"] is False
    [job] = json.loads(run_verb(config, "get", "-o", "json", at)[1])["jobs"]
    assert job["metadata"]["name"] == "tiny-sft"
    assert run_verb(config, "cancel", "tiny-sft", at)[0] == 0
    assert control_plane.api.get(jobs.path(namespace))["items"] == []


def test_a_dry_run_creates_nothing(control_plane: ControlPlane, namespace: str) -> None:
    code, output, _ = run_verb(control_plane.kubeconfig, *SUBMIT, "--dry-run", "-n", namespace)
    assert (code, "nothing was created" in output) == (0, True)
    assert control_plane.api.get(jobs.path(namespace))["items"] == []


def test_a_sweep_creates_a_job_of_each_value(control_plane: ControlPlane, namespace: str) -> None:
    sweep = [*SUBMIT, "--set", "training.optimizer.learningRate=0.001,0.003", "-n", namespace]
    code, output, errors = run_verb(control_plane.kubeconfig, *sweep)
    assert (code, len(output.splitlines())) == (0, 2)
    assert "`moejob open tiny-sft-lr-0-001 tiny-sft-lr-0-003` overlays their curves" in errors
    created = control_plane.api.get(jobs.path(namespace))["items"]
    assert {job["metadata"]["name"]: job["spec"]["training"]["optimizer"]["learningRate"] for job in created} == {
        "tiny-sft-lr-0-001": 0.001,
        "tiny-sft-lr-0-003": 0.003,
    }
    code, _, errors = run_verb(control_plane.kubeconfig, *sweep, "--follow")
    assert (code, "follows one job" in errors) == (2, True)


@pytest.mark.parametrize(("phase", "code"), [("Succeeded", 0), ("Failed", 1)])
def test_watch_prints_changes_and_ends_with_the_job(
    control_plane: ControlPlane, namespace: str, phase: str, code: int
) -> None:
    control_plane.api.create(jobs.path(namespace), jobs.body())
    write_status(control_plane, namespace, "job", phase="Running", display={"step": "1/7"})
    process = start_verb(control_plane.kubeconfig, "watch", "job", "-n", namespace)
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    write_status(control_plane, namespace, "job", phase=phase, display={"step": "7/7"})
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, "")
    assert [line.split()[:3] for line in [*lines, *output.splitlines()]] == [
        ["NAME", "PHASE", "STEP"],
        ["job", "Running", "1/7"],
        ["job", phase, "7/7"],
    ]


def test_jobs_of_a_namespace_are_watched_over_one_connection(control_plane: ControlPlane, namespace: str) -> None:
    since = control_plane.audit_log.stat().st_size
    for index in range(40):
        control_plane.api.create(jobs.path(namespace), jobs.body(f"job-{index}"))
    process = start_verb(control_plane.kubeconfig, "watch", "-n", namespace)
    assert process.stdout is not None
    try:
        for _ in range(41):
            process.stdout.readline()
        for index in range(40):
            write_status(control_plane, namespace, f"job-{index}", phase="Running")
        changed = {process.stdout.readline().split()[0] for _ in range(40)}
    finally:
        process.kill()
        process.communicate()
    assert len(changed) == 40

    def watches() -> set[str]:
        found = (entry for entry in control_plane.audited(since) if entry["verb"] == "watch")
        return {
            entry["auditID"] for entry in found if f"/namespaces/{namespace}/moetrainingjobs" in entry["requestURI"]
        }

    until(lambda: len(watches()) == 1, waiting_for="one watch in the audit log")


def test_why_reads_the_pods_and_events_of_the_namespace(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.api.create(jobs.path(namespace), jobs.body())
    code, output, errors = run_verb(control_plane.kubeconfig, "why", "job", "-n", namespace)
    assert (code, errors) == (1, "")
    assert output.startswith(f"{namespace}/job: new, ")


def test_why_says_which_evidence_the_rights_leave_out(control_plane: ControlPlane, namespace: str) -> None:
    let_read_jobs(control_plane, namespace, ["get", "list"])
    control_plane.api.create(jobs.path(namespace), jobs.body())
    config = control_plane.service_account_kubeconfig(namespace, "default")
    until(lambda: run_verb(config, "get", "job")[0] == 0, waiting_for="the rights to be in force")
    code, output, errors = run_verb(config, "why", "job")
    assert (code, output.startswith(f"{namespace}/job: new, ")) == (1, True)
    assert errors.startswith("note: your rights do not let you list pods, persistentvolumeclaims, events")


@pytest.fixture
def _heard_interrupts() -> Iterator[None]:
    """Processes of a shell's background ignore Ctrl-C, and so do their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard_interrupts")
@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (["watch", "job"], ""),
        (["logs", "-f", "job"], "job: Running, no pod has started yet\n"),
        (["submit", str(TINY), "--follow"], "detached: the job continues; `moejob watch tiny-sft -n"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_ctrl_c_ends_what_follows_a_job_and_leaves_the_job_alone(
    control_plane: ControlPlane, namespace: str, verb: list[str], words: str
) -> None:
    control_plane.api.create(jobs.path(namespace), jobs.body())
    write_status(control_plane, namespace, "job", phase="Running")
    process = start_verb(control_plane.kubeconfig, *verb, "-n", namespace)
    stream = process.stderr if verb[0] == "logs" else process.stdout
    assert stream is not None
    shown = ""
    while not any(word in shown for word in ("Running", "New")):
        shown += stream.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (shown if verb[0] == "logs" else errors).startswith(words)
    assert "Traceback" not in errors
    name = "tiny-sft" if verb[0] == "submit" else "job"
    assert "deletionTimestamp" not in control_plane.api.get(jobs.path(namespace, name))["metadata"]


@pytest.mark.parametrize("verb", VERBS, ids=name_verb)
def test_a_missing_job_is_one_sentence(control_plane: ControlPlane, namespace: str, verb: list[str]) -> None:
    code, output, errors = run_verb(control_plane.kubeconfig, *verb, "-n", namespace)
    assert (code, len(errors.splitlines())) == (3, 1), output
    assert '"job" not found; `moejob get` lists the jobs' in errors


@pytest.mark.parametrize("verb", ALL, ids=name_verb)
def test_missing_rights_are_one_sentence(control_plane: ControlPlane, namespace: str, verb: list[str]) -> None:
    stranger = control_plane.service_account_kubeconfig(namespace, "default")
    code, _, errors = run_verb(stranger, *verb)
    assert (code, len(errors.splitlines())) == (4, 1)
    assert "no rights" in errors
    assert "moejob-edit" in errors


def test_doctor_finds_the_definition_and_the_rights_of_a_stranger(control_plane: ControlPlane, namespace: str) -> None:
    code, output, errors = run_verb(control_plane.kubeconfig, *DOCTOR, "-n", namespace)
    assert (code, errors) == (1, "")
    assert "has every field of this moejob" in output
    assert output.count("all rights in") == 4
    stranger = control_plane.service_account_kubeconfig(namespace, "default")
    code, output, errors = run_verb(stranger, *DOCTOR)
    assert (code, errors) == (1, "")
    assert "no right to create pods/exec" in output
    assert "unknown  nodes" in output


@pytest.mark.parametrize("verb", [*ALL, DOCTOR], ids=name_verb)
def test_an_api_server_that_is_not_there_is_one_sentence(
    control_plane: ControlPlane, tmp_path: Path, verb: list[str]
) -> None:
    nowhere = write_for_token(tmp_path / "nowhere", Server("https://127.0.0.1:1", control_plane.ca), "token", "default")
    code, _, errors = run_verb(nowhere, *verb)
    assert (code, len(errors.splitlines())) == (5, 1)
    assert "the API server does not answer" in errors


def test_a_token_that_is_not_accepted_is_one_sentence(control_plane: ControlPlane, tmp_path: Path) -> None:
    server = Server(control_plane.url, control_plane.ca)
    code, _, errors = run_verb(write_for_token(tmp_path / "expired", server, "token", "default"), "get")
    assert (code, len(errors.splitlines())) == (4, 1)
    assert "log in again" in errors


def test_a_program_works_with_the_rights_of_an_editor_of_one_namespace(
    control_plane: ControlPlane, namespace: str
) -> None:
    let_read_jobs(control_plane, namespace, ["get", "list", "watch", "patch", "delete"])
    control_plane.api.create(jobs.path(namespace), jobs.body())
    with Client(kubeconfig=control_plane.service_account_kubeconfig(namespace, "default")) as client:
        assert client.namespace == namespace
        until(lambda: can_list(client), waiting_for="the rights to be in force")
        client.suspend("job")
        write_status(control_plane, namespace, "job", phase="Succeeded")
        assert client.wait("@latest").is_finished
        client.cancel("job")
        assert client.list_jobs() == ()


def let_read_jobs(control_plane: ControlPlane, namespace: str, verbs: list[str]) -> None:
    """Give the account of a namespace rights to jobs alone."""
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rules = [{"apiGroups": ["moejob.dev"], "resources": ["moetrainingjobs"], "verbs": verbs}]
    control_plane.api.create(f"{roles}/roles", {"metadata": {"name": "editor"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "editor"}
    bound = {"metadata": {"name": "editor"}, "roleRef": role, "subjects": [subject]}
    control_plane.api.create(f"{roles}/rolebindings", bound)


def can_list(client: Client) -> bool:
    try:
        return bool(client.list_jobs())
    except JobRequestError:
        return False
