"""Pages show jobs that are accepted, settings that exist, commands that can be typed and plans that can be made."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from typer.main import get_command

from builders import merge_sections
from documented import TypedCommand, mentioned_commands, run_in_shell, typed_commands
from image_builds.recipes import ROOT
from moejob_api.documents.reading import read_job
from moejob_cli.app import app
from moejob_operator.validation import validate_spec

PAGES = sorted((ROOT / "docs").rglob("*.md"))
# A block with a title shows another project's file.
BLOCK = re.compile(r"^( *)```yaml\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
JOB = {
    "apiVersion": "moejob.dev/v1alpha1",
    "kind": "MoETrainingJob",
    "metadata": {"name": "shown"},
    "spec": {
        "model": {"source": "Qwen/Qwen3-30B-A3B"},
        "parallelism": {"expert": 8, "data": 4},
        "storage": {"size": "8Ti"},
        "resources": {"gpuType": "H200"},
    },
}
SFT = {
    "method": "SFT",
    "data": {"train": [{"source": "pvc://a/b", "format": "Chat"}]},
    "training": {"maxSteps": 50, "globalBatchSize": 256},
}
GRPO = {
    "method": "GRPO",
    "data": {"train": [{"source": "pvc://a/b", "format": "Prompts"}]},
    "training": {"maxSteps": 50},
}


def blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for _, text in BLOCK.findall(page.read_text()):
            yield page.relative_to(ROOT).as_posix(), dedent(text)


def settings() -> list[Any]:
    """Jobs, and parts of a spec, which are shown within a job that has the rest."""
    found: list[Any] = []
    for page, text in blocks():
        shown = yaml.safe_load(text)
        # Values of the chart, whose tests read them.
        if shown.keys() & {"limits", "networkPolicy", "gpuNodes"}:
            continue
        if "kind" not in shown:
            shown = merge_sections(JOB, {"spec": merge_sections(GRPO if "grpo" in shown else SFT, shown)})
        if shown["kind"] == "MoETrainingJob":
            found.append(pytest.param(yaml.safe_dump(shown), id=f"{page}: {text.splitlines()[0]} {len(found)}"))
    return found


@pytest.mark.parametrize("text", settings())
def test_settings_that_are_shown_are_accepted(text: str) -> None:
    validation = validate_spec(read_job(text, "the page").spec)
    assert validation.is_accepted, validation.problems


@pytest.mark.parametrize("one", typed_commands("moejob "), ids=str)
def test_a_command_that_is_shown_can_be_typed(
    one: TypedCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, name, *words = shlex.split(one.command)
    # Files of the reader's own.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("")
    words = [str(next(ROOT.glob(word))) if word.startswith("examples/") else word for word in words]
    get_command(app).commands[name].make_context(name, words)  # type: ignore[attr-defined]


@pytest.mark.parametrize("one", typed_commands("moejob plan", "moejob validate"), ids=str)
def test_a_plan_that_is_shown_is_made(one: TypedCommand, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "job.yaml").symlink_to(ROOT / "examples" / "qwen3-30b-sft-8gpu.yaml")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = run_in_shell(one.command, tmp_path, {"PATH": path, "HF_HUB_OFFLINE": "1"})
    # Other GPUs than the job's are refused, with the layouts that work on them.
    is_refused = "--gpus" in one.command and "--auto" not in one.command
    assert ran.returncode == is_refused, ran.stdout + ran.stderr


@pytest.mark.parametrize("one", mentioned_commands("moejob "), ids=str)
def test_a_command_within_the_text_has_the_options_that_there_are(one: TypedCommand) -> None:
    _, name, *words = shlex.split(one.command)
    group: Any = get_command(app)
    found = group if name.startswith("-") else group.commands[name]
    known = {option for parameter in found.params for option in parameter.opts}
    assert {word for word in (name, *words) if word.startswith("-")} <= known


def test_a_make_target_that_a_message_names_is_there() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*/src/*/**/*.py"))
    named = set(re.findall(r"`make ([a-z-]+)`", sources))
    assert "setup" in named
    assert [target for target in named if f"\n{target}:" not in (ROOT / "Makefile").read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("one", [*typed_commands("make "), *mentioned_commands("make ")], ids=str)
def test_a_make_target_that_is_shown_is_there(one: TypedCommand) -> None:
    assert f"\n{shlex.split(one.command)[1]}:" in (ROOT / "Makefile").read_text()


def test_every_file_that_a_command_names_is_there() -> None:
    words = [
        word for one in typed_commands() for word in one.command.split() if word.startswith(("examples/", "charts/"))
    ]
    assert words
    assert [word for word in words if not any(ROOT.glob(word))] == []
