"""The commands and jobs of docs/getting-started.md are tried: what people copy has to work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from charts import Helm
from moejob_api.documents.reading import read_job
from moejob_operator.judging import judgement

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "getting-started.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
JOBS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
VERSION = (ROOT / "VERSION").read_text().strip()


def test_the_chart_is_installed_from_the_registry_that_images_were_pushed_to(helm: Helm) -> None:
    [install] = [shlex.split(command) for command in COMMANDS if command.startswith("helm install moejob")]
    assert install[3] == "charts/moejob"
    options = [word for word in install[4:] if word != "--create-namespace"]
    rendered = helm.run("template", "moejob", ROOT / "charts" / "moejob", *options)
    images = set(re.findall(r"registry\.example\.com/\S+?:[\w.]+", rendered))
    pushed = {command.split()[-1] for command in COMMANDS if command.startswith("docker push")}
    assert pushed <= images
    assert images - pushed == {f"registry.example.com/ml/moejob-rollout:{VERSION}"}


@pytest.mark.parametrize("text", [pytest.param(text, id=text.split("name: ")[1].split("\n")[0]) for text in JOBS])
def test_a_job_to_copy_is_accepted(text: str) -> None:
    judged = judgement(read_job(text, "docs/getting-started.md").spec)
    assert judged.is_accepted, judged.problems


def test_every_file_that_is_named_is_there() -> None:
    named = {word for command in COMMANDS for word in command.split() if word.startswith("examples/")}
    assert named
    assert [word for word in named if not (ROOT / word).exists()] == []


@pytest.mark.parametrize(
    "target", sorted({word for command in COMMANDS for word in re.findall(r"^make (\S+)", command)})
)
def test_every_make_target_is_there(target: str) -> None:
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()
