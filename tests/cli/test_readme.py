"""The commands of the README run on a fresh clone in the order in which they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from image_builds.recipes import ROOT
from moejob_api.documents.reading import read_job

PAGE = (ROOT / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
TYPED = re.findall(r"`(make [a-z-]+|moejob [a-z-]+[^`]*)`", PAGE)


def test_a_speed_that_is_named_is_on_a_page_of_measurements() -> None:
    """A speed that is measured again is another number there, and this page does not keep the old one."""
    table = PAGE.partition("| measured | hardware | speed |")[2].partition("\n\n")[0]
    numbers = re.findall(r"\b\d[\d,]*\.?\d*\b", " ".join(row.split("|")[3] for row in table.splitlines()[2:]))
    measured = "".join(page.read_text() for page in (ROOT / "benchmarks").glob("*.md"))
    assert len(numbers) > 6
    assert [number for number in numbers if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d,])", measured)] == []


def test_the_first_screen_is_the_demo_the_page_of_a_run_and_a_cluster() -> None:
    before_the_first_section = PAGE.partition("\n## ")[0]
    pictures = re.findall(r"!\[[^\]]+\]\(docs/pictures/([^)]+)\)", before_the_first_section)
    assert pictures == ["demo.svg", "cluster.svg", "board-timeline.png"]


def test_the_environment_that_is_activated_has_been_built_by_then() -> None:
    activated = next(place for place, command in enumerate(COMMANDS) if command.startswith("source .venv/"))
    assert COMMANDS[0] == "make demo"
    assert activated > 0
    assert not any(command.startswith("moejob") for command in COMMANDS[:activated])


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("moejob ")])
def test_a_command_of_a_code_block_succeeds(command: str) -> None:
    ran = _ran(["bash", "-c", command])
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("command", sorted({typed for typed in TYPED if typed.startswith("moejob plan")}))
def test_a_command_within_the_text_answers_for_a_job_of_the_reader(command: str, tmp_path: Path) -> None:
    ran = _ran(_with_own_files(shlex.split(command), tmp_path))
    # A job for other GPUs than those that are there is refused too, with the layouts that work on them.
    is_refused = "wrong/" in command or command.endswith("job.yaml --gpus 64")
    assert ran.returncode == is_refused, ran.stdout + ran.stderr


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", PAGE))))
def test_a_make_target_that_is_named_is_there(target: str) -> None:
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_every_file_that_is_named_is_there() -> None:
    linked = re.findall(r"\]\(([^):]+)\)", PAGE)
    words = [word for command in COMMANDS for word in command.split()]
    named = [word for word in words if word.startswith("examples/") and "*" not in word]
    assert linked
    # Sections behind `#` are the docs site's to check, which fails at a link that leads nowhere.
    assert [path for path in [*linked, *named] if not (ROOT / path.partition("#")[0]).exists()] == []


def test_the_job_that_is_shown_can_be_read() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert read_job(text, "README.md").metadata.name == "qwen3-sft"


def _with_own_files(words: list[str], folder: Path) -> list[str]:
    """Read an example as the reader's job, and write into a folder of the test."""
    job, written = str(ROOT / "examples" / "mixtral-8x7b-sft-16gpu.yaml"), str(folder / "written.yaml")
    return [
        written if before == "--write" else job if word == "job.yaml" else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def _ran(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(words, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
