"""The chart is installed as pages say: what people copy has to work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from charts import Helm
from documented import TypedCommand, typed_commands

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "getting-started.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
JOBS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
# They are about the release that is there, or the cluster.
NOT_RENDERED = ("--create-namespace", "--reset-then-reuse-values")
VERSION = (ROOT / "VERSION").read_text().strip()


def test_the_chart_is_installed_from_the_registry_that_images_were_pushed_to(helm: Helm) -> None:
    [install] = [shlex.split(command) for command in COMMANDS if command.startswith("helm install moejob")]
    assert install[3] == "charts/moejob"
    options = [word for word in install[4:] if word != "--create-namespace"]
    rendered = helm.run("template", "moejob", ROOT / "charts" / "moejob", *options)
    images = set(re.findall(r"registry\.example\.com/\S+?:[\w.]+", rendered))
    pushed = {command.split()[-1] for command in COMMANDS if command.startswith("docker push")}
    assert pushed <= images
    # Those that only GRPO needs.
    of_grpo = {f"registry.example.com/ml/moejob-{name}:{VERSION}" for name in ("rollout", "trainer-colocated")}
    assert images - pushed == of_grpo


@pytest.mark.parametrize("one", typed_commands("helm install moejob", "helm upgrade moejob"), ids=str)
def test_what_is_installed_can_be_rendered(helm: Helm, one: TypedCommand) -> None:
    options = [word for word in shlex.split(one.command)[4:] if word not in NOT_RENDERED]
    assert "kind: Deployment" in helm.run("template", "moejob", ROOT / "charts" / "moejob", *options)
