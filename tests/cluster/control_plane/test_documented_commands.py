"""Each page's kubectl commands, typed into a shell before a real API server that has the jobs they name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.control_plane import jobs
from cluster.control_plane.plane import ControlPlane
from documented import ROOT, TypedCommand, mentioned_commands, run_in_shell, typed_commands
from moejob_api.documents.reading import read_job

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("definition")]

COMMANDS = [one for one in typed_commands() if "kubectl " in one.command]
# Whole questions within the text; what is cut short there names no object.
QUESTIONS = mentioned_commands("kubectl get ", "kubectl explain ", "kubectl version", "kubectl api-resources")
# Follows forever, or ends what other tests need.
ENDLESS = ("--watch", "--follow")
KUBECTL = """#!/usr/bin/env bash
words=()
for word in "$@"; do case "$word" in {endless}) ;; *) words+=("$word") ;; esac; done
case "$1" in delete) words+=(--dry-run=server) ;; esac
case " $* " in *" --all-namespaces "*) ;; *) words+=(--namespace={namespace}) ;; esac
exec {kubectl} "${{words[@]}}"
"""


@pytest.fixture
def kubectl(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """A shell with kubectl, in a namespace of its own."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    quoted = shlex.join(map(str, control_plane.kubectl_command()))
    program.write_text(KUBECTL.format(endless="|".join(ENDLESS), namespace=namespace, kubectl=quoted))
    program.chmod(0o755)
    # Some commands hand the answer to moejob, which lies beside this Python.
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return lambda command: run_in_shell(command, tmp_path, {"PATH": path, "KUBERC": "off"})


@pytest.mark.parametrize("page", sorted({one.page for one in COMMANDS}))
def test_the_commands_of_a_page_are_answered(
    control_plane: ControlPlane,
    namespace: str,
    kubectl: Callable[[str], subprocess.CompletedProcess[str]],
    tmp_path: Path,
    page: str,
) -> None:
    for name, text in shown_files(page).items():
        (tmp_path / name).write_text(text)
    for name in named_jobs(page):
        control_plane.api.create(jobs.path(namespace), jobs.body(name))
    for command in (one.command for one in COMMANDS if one.page == page):
        finish_jobs(control_plane, namespace)
        answer = kubectl(command.replace("NAME", "job"))
        # No operator is here, so there are no pods; and some examples are wrong on purpose.
        expected = r" is invalid: " if "examples/wrong/" in command else r'pods "\S+" not found'
        assert answer.returncode == 0 or re.search(expected, answer.stderr), command + answer.stderr


@pytest.mark.parametrize("one", QUESTIONS, ids=str)
def test_a_question_within_the_text_is_answered(
    kubectl: Callable[[str], subprocess.CompletedProcess[str]], one: TypedCommand
) -> None:
    answer = kubectl(one.command)
    assert answer.returncode == 0, answer.stderr


def finish_jobs(plane: ControlPlane, namespace: str) -> None:
    """Say of all jobs that they have ended, for those who wait for that: no operator does."""
    for job in plane.api.get(jobs.path(namespace))["items"]:
        plane.api.merge(
            jobs.path(namespace, job["metadata"]["name"], part="status"), {"status": {"phase": "Succeeded"}}
        )


def named_jobs(page: str) -> set[str]:
    """Jobs that commands ask about and that no command before has applied."""
    asked = [one.command for one in COMMANDS if one.page == page]
    named = {found for command in asked for found in re.findall(r"(?:moetrainingjob|mtj)[ /]([a-z][\w.-]*)", command)}
    applied = {
        read_job((ROOT / path).read_text(), path).metadata.name
        for path in applied_files(page)
        if (ROOT / path).exists()
    }
    shown = {read_job(text, name).metadata.name for name, text in shown_files(page).items()}
    return (named | {"job"} if any("NAME" in command for command in asked) else named) - applied - shown


def applied_files(page: str) -> list[str]:
    return [
        found
        for one in COMMANDS
        if one.page == page
        for found in re.findall(r"kubectl apply (?:-f|--filename) (\S+\.yaml)", one.command)
    ]


def shown_files(page: str) -> dict[str, str]:
    """The first job that a page shows, under the name of the file that the reader applies."""
    own = [path for path in applied_files(page) if not (ROOT / path).exists()]
    blocks = re.findall(r"^```yaml\n(apiVersion: moejob.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return dict(zip(dict.fromkeys(own), blocks, strict=False))


def test_commands_are_found() -> None:
    assert {TypedCommand("README.md", "kubectl get moetrainingjobs")} < set(COMMANDS)
    assert {TypedCommand("README.md", "kubectl explain moetrainingjob.spec")} < set(QUESTIONS)
