"""Commands for each engine, and names of images: decided without any engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builds.__main__ import DEFAULT, order
from image_builds.commands import Store, Supplies, buildah_build, docker_build, podman_build
from image_builds.engines import on_local_bases
from image_builds.recipes import RECIPES, ROOT, Order, UnknownImageError, chosen, closure_key, reference, repository
from moejob_api.contract.pods import PodPort
from moejob_api.job.resources import Resources
from moejob_operator.runtime.settings import Settings

GIVEN = Supplies({"certificates": Path("/ca.crt")}, Path("/downloads"))
VERSION = (ROOT / "VERSION").read_text().strip()
CHART = ROOT / "charts" / "moejob"


def option(command: list[str], name: str) -> list[str]:
    """Every value of an option."""
    return [value for flag, value in pairwise(command) if flag == name]


def last_stage(dockerfile: str, target: str) -> dict[str, str]:
    """The instructions that hold for a stage, those of the stages that it builds on included."""
    stages: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in re.sub(r"\\\n\s*", " ", dockerfile).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = stages[name] = dict(stages.get(base, {}))
        else:
            current[word] = rest
    return stages[target]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda wanted: docker_build(wanted, GIVEN), id="docker"),
        pytest.param(lambda wanted: podman_build(wanted, GIVEN), id="podman"),
        pytest.param(lambda wanted: buildah_build(wanted, GIVEN, Store(Path("/s"), "overlay")), id="buildah"),
    ],
)
def test_every_engine_gets_the_same_order(build: Callable[[Order], list[str]]) -> None:
    wanted = order(RECIPES["trainer-cpu"], {"PREFIX": "registry.example.com/ml/", "TAG": "1", "BASE": "python:3.13"})
    command = build(wanted)
    assert option(command, "--file") == ["-"]
    assert option(command, "--target") == ["cpu"]
    assert option(command, "--tag") == ["registry.example.com/ml/moejob-trainer-cpu:1"]
    assert "BASE=python:3.13" in option(command, "--build-arg")
    assert f"org.opencontainers.image.version={VERSION}" in option(command, "--label")
    assert option(command, "--secret") == ["id=certificates,src=/ca.crt"]
    assert command[-1] == "."


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_ends_with_its_stage_of_a_dockerfile(name: str) -> None:
    wanted = order(RECIPES[name], {})
    assert [line for line in wanted.dockerfile.splitlines() if line.startswith("FROM ")][-1].endswith(
        f" AS {wanted.recipe.target}"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_no_step_reads_an_argument_that_changes_with_the_commit(name: str) -> None:
    """Buildah takes `LABEL revision=$REVISION` for the step that it did at another commit."""
    assert re.findall(r"^ARG (\w+)$", (ROOT / RECIPES[name].dockerfile).read_text(), re.MULTILINE) == []


@pytest.mark.parametrize("name", RECIPES)
def test_without_a_registry_every_base_is_local(name: str) -> None:
    arguments = on_local_bases(order(RECIPES[name], {})).arguments
    declared = set(re.findall(r"^ARG (\w+)=", (ROOT / RECIPES[name].dockerfile).read_text(), re.MULTILINE))
    assert arguments.keys() == declared
    assert all(base.startswith("localhost/moejob-") for base in arguments.values())


def test_a_base_that_is_named_is_taken() -> None:
    arguments = on_local_bases(order(RECIPES["operator"], {"RUNTIME": "distroless"})).arguments
    assert arguments["RUNTIME"] == "distroless"
    assert closure_key(on_local_bases(order(RECIPES["operator"], {}))) != closure_key(
        on_local_bases(order(RECIPES["operator"], {"BASE": "python:3.13"}))
    )


def test_an_unknown_image_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownImageError, match=r"no image is called trainer-gpu; there are operator, trainer, "):
        chosen("operator trainer-gpu")


def test_what_is_built_by_default_is_what_the_chart_names() -> None:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    named = {name: values["trainerColocated" if name == "trainer-colocated" else name] for name in DEFAULT.split()}
    assert named == {name: repository(name) for name in DEFAULT.split()}
    tag = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert [order(recipe, {}).reference for recipe in chosen(DEFAULT)] == [f"{name}:{tag}" for name in named.values()]


def test_pods_of_jobs_that_name_no_image_get_what_is_built() -> None:
    assert (Resources().image, Resources().rollout_image) == (None, None)
    defaults = Settings(own_namespace="n", _env_prefix="NONE_")
    named = (defaults.trainer_image, defaults.trainer_colocated_image, defaults.rollout_image)
    assert named == tuple(map(repository, ("trainer", "trainer-colocated", "rollout")))


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        pytest.param("", "moejob-operator:1", id="none"),
        pytest.param("ml", "ml/moejob-operator:1", id="a folder"),
        pytest.param(
            "registry.example.com:5000/ml/", "registry.example.com:5000/ml/moejob-operator:1", id="a registry"
        ),
    ],
)
def test_a_prefix_stands_before_the_name(prefix: str, expected: str) -> None:
    assert reference(RECIPES["operator"], prefix, "1") == expected


@pytest.mark.parametrize(
    ("name", "entry", "ports"),
    [
        pytest.param("operator", '["python", "-m", "moejob_operator"]', (8080, 9443), id="operator"),
        *(
            pytest.param(
                name, '["python", "-m", "moejob_trainer.launcher"]', (PodPort.PROGRESS, PodPort.RENDEZVOUS), id=name
            )
            for name in RECIPES
            if name.startswith("trainer")
        ),
        *(
            pytest.param(name, '["python", "-m", "moejob_rollout"]', (PodPort.ROLLOUT,), id=name)
            for name in RECIPES
            if name.startswith("rollout")
        ),
    ],
)
def test_an_image_starts_what_pods_expect_as_a_user_that_is_not_root(
    name: str, entry: str, ports: tuple[int, ...]
) -> None:
    wanted = order(RECIPES[name], {})
    said = last_stage(wanted.dockerfile, wanted.recipe.target)
    assert said["ENTRYPOINT"] == entry
    assert said["EXPOSE"] == " ".join(f"{port:d}" for port in ports)
    assert said["USER"] == "65532:65532"


def test_an_argument_is_refused_before_anything_is_built() -> None:
    """Else `--help` would build the default images. IMAGES names none, so that a failure builds nothing either."""
    environ = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), "IMAGES": "none"}
    command = [sys.executable, "-m", "image_builds", "operator"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "unrecognized arguments: operator" in done.stderr) == (2, True)
