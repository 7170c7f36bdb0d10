"""Pages of docs/ show jobs that are accepted, settings that exist, and commands that can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from builders import merged
from image_builds.recipes import ROOT
from moejob_api.documents.reading import read_job
from moejob_cli.app import app
from moejob_operator.validation import validation_of

PAGES = sorted((ROOT / "docs").rglob("*.md"))
# A block with a title shows another project's file.
BLOCK = re.compile(r"^```(yaml|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
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


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for found, text in BLOCK.findall(page.read_text()):
            if found == language:
                yield page.relative_to(ROOT).as_posix(), text


def commands(*begin: str) -> list[Any]:
    """The commands of all pages that begin so, each once."""
    typed = {
        (page, line.removeprefix("$ "))
        for page, text in blocks("console")
        for line in text.splitlines()
        if line.startswith("$ ")
    }
    return [pytest.param(line, id=f"{page}: {line}") for page, line in sorted(typed) if line.startswith(begin)]


def settings() -> list[Any]:
    """Jobs, and parts of a spec, which are shown within a job that has the rest."""
    found: list[Any] = []
    for page, text in blocks("yaml"):
        shown = yaml.safe_load(text)
        # Values of the chart, whose tests read them.
        if "limits" in shown:
            continue
        if "kind" not in shown:
            shown = merged(JOB, {"spec": merged(GRPO if "grpo" in shown else SFT, shown)})
        if shown["kind"] == "MoETrainingJob":
            found.append(pytest.param(yaml.safe_dump(shown), id=f"{page}: {text.splitlines()[0]} {len(found)}"))
    return found


@pytest.mark.parametrize("text", settings())
def test_settings_that_are_shown_are_accepted(text: str) -> None:
    validation = validation_of(read_job(text, "the page").spec)
    assert validation.is_accepted, validation.problems


@pytest.mark.parametrize("command", commands("moejob "))
def test_a_command_that_is_shown_can_be_typed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, name, *words = shlex.split(command)
    # Files of the reader's own.
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith(".yaml") and not (ROOT / word).exists():
            (tmp_path / word).write_text("")
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    get_command(app).commands[name].make_context(name, words)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", commands("make "))
def test_a_make_target_that_is_shown_is_there(command: str) -> None:
    assert f"\n{shlex.split(command)[1]}:" in (ROOT / "Makefile").read_text()


def test_every_file_that_a_command_names_is_there() -> None:
    words = [
        word for shown in commands("") for word in shown.values[0].split() if word.startswith(("examples/", "charts/"))
    ]
    assert words
    assert [word for word in words if not (ROOT / word).exists()] == []
