"""The packages as people install them: wheels in an empty environment, far from the tree that they were built of."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from image_builds.recipes import ROOT

PACKAGES = {"moejob", "moejob_api", "moejob_client", "moejob_operator", "moejob_trainer", "moejob_rollout"}
SECONDS = 300


@dataclass(frozen=True)
class Installed:
    """An environment with wheels, and an empty folder that its programs run in."""

    programs: Path
    folder: Path
    wheels: Path

    def run(self, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program that knows nothing of this tree: no variable but these, and a home that is empty."""
        return subprocess.run(
            [self.programs / program, *arguments], cwd=self.folder, env=self.environment(variables),
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "COLUMNS": "120", **variables}


def run_uv(*arguments: str | Path) -> None:
    subprocess.run([ROOT / "scripts" / "uv", "--quiet", *arguments], cwd=ROOT, check=True, timeout=SECONDS)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages, built by the release's own target."""
    folder = tmp_path_factory.mktemp("wheels")
    make = shutil.which("make") or "make"
    subprocess.run([make, "--silent", "wheels", f"OUT={folder}"], cwd=ROOT, check=True, timeout=SECONDS)
    return folder


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """`pip install moejob`, with versions that were tested."""
    folder = tmp_path_factory.mktemp("installed")
    run_uv("venv", "--python", sys.executable, folder / "venv")
    run_uv(
        *("pip", "install", "--python", folder / "venv", "--find-links", wheels),
        *("--constraint", ROOT / "requirements" / "operator.txt", "moejob"),
    )
    (folder / "empty").mkdir()
    for example in ("tiny-sft.yaml",):
        shutil.copy(ROOT / "examples" / example, folder / "empty")
    return Installed(folder / "venv" / "bin", folder / "empty", wheels)


def test_each_package_is_a_wheel_of_this_version_with_what_it_needs_from_the_tree(wheels: Path) -> None:
    version = (ROOT / "VERSION").read_text().strip()
    assert {file.name for file in wheels.glob("*.whl")} == {f"{name}-{version}-py3-none-any.whl" for name in PACKAGES}
    for name, part in (
        ("moejob", "moejob_cli/board/assets/page.js"),
        ("moejob", "moejob_cli/running/trainer_files/requirements/trainer.txt"),
        ("moejob_api", "moejob_api/models/catalog/moejob--tiny-moe.json"),
        ("moejob_api", "moejob_api/py.typed"),
    ):
        assert part in ZipFile(wheels / f"{name}-{version}-py3-none-any.whl").namelist()


def test_each_wheel_asks_for_its_siblings_at_its_own_version(wheels: Path) -> None:
    version = (ROOT / "VERSION").read_text().strip()
    for wheel in wheels.glob("*.whl"):
        [name] = [name for name in ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
        needed = re.findall(r"^Requires-Dist: (moejob\S*)$", ZipFile(wheel).read(name).decode(), re.MULTILINE)
        assert [need for need in needed if not need.endswith(f"=={version}")] == []
        assert bool(needed) is not wheel.name.startswith("moejob_api-")


def test_no_wheel_holds_tests_or_files_of_this_machine(wheels: Path) -> None:
    for wheel in wheels.glob("*.whl"):
        names = ZipFile(wheel).namelist()
        assert [name for name in names if "test" in Path(name).name or "__pycache__" in name] == []
        assert {name.partition("/")[0].partition("-")[0] for name in names} <= {*PACKAGES, "moejob_cli"}


def test_nothing_of_the_tree_is_on_the_path(installed: Installed) -> None:
    script = "import moejob_api, moejob_cli, moejob_client, sys; print(*sys.path, moejob_cli.__file__, sep='\\n')"
    answer = installed.run("python", "-c", script)
    assert answer.returncode == 0
    assert str(ROOT) not in answer.stdout
    assert "moejob_operator" not in answer.stdout


def test_a_job_is_validated_and_planned(installed: Installed) -> None:
    assert installed.run("moejob", "--version").stdout == f"moejob {(ROOT / 'VERSION').read_text().strip()}\n"
    assert installed.run("moejob", "validate", "tiny-sft.yaml").stdout == "tiny-sft.yaml: accepted\n"
    answer = installed.run("moejob", "plan", "tiny-sft.yaml", "-o", "json")
    assert (answer.returncode, yaml.safe_load(answer.stdout)["layout"]["gpus"]) == (0, 2)
    assert "CustomResourceDefinition" in installed.run("moejob", "schema").stdout


@pytest.mark.parametrize("program", ["moejob", "kubectl-moejob"])
def test_every_verb_is_there_and_says_what_it_lacks(installed: Installed, program: str) -> None:
    commands = re.findall(r"^  (\w+) +[A-Z]", installed.run(program, "--help").stdout, re.MULTILINE)
    assert {"plan", "run", "why", "board", "submit", "get", "watch", "suspend", "resume", "cancel"} <= set(commands)
    for command in commands:
        answer = installed.run(program, command, "--help")
        assert (answer.returncode, answer.stderr) == (0, "")
    answer = installed.run(program, "get")
    assert answer.returncode != 0
    assert "no cluster is configured" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.fixture
def first_use(tmp_path: Path) -> dict[str, str]:
    """A cache without a trainer, with the packages that this checkout has downloaded: no network is needed."""
    python = ROOT / ".venv" / "trainer" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no .venv/trainer; run `make setup`")
    own_cache = Path(os.environ.get("MOEJOB_CACHE") or Path.home() / ".cache" / "moejob")
    for folder in [own_cache / "packages", *own_cache.glob("uv-*")]:
        (tmp_path / folder.name).symlink_to(folder)
    return {
        "MOEJOB_CACHE": str(tmp_path), "PYTHON": str(python), "UV_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


@pytest.mark.slow
def test_the_demo_installs_the_trainer_once_and_every_command_trains_with_it(
    installed: Installed, first_use: dict[str, str]
) -> None:
    refused = installed.run("moejob", "run", "tiny-sft.yaml", **first_use)
    assert refused.returncode != 0
    assert "there is no trainer here: `moejob demo` installs it" in refused.stderr
    answer = installed.run("moejob", "demo", "--wheels", str(installed.wheels), **first_use)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "installing the trainer with " in answer.stderr
    assert answer.stdout.endswith("\ncount from 2 to 5\n2 3 4 5\n")
    [trainer] = Path(first_use["MOEJOB_CACHE"]).glob("trainers/*/venv/bin/python")
    script = "import moejob_trainer, moejob_api; print(moejob_trainer.__file__, moejob_api.__file__)"
    found = subprocess.run([trainer, "-c", script], capture_output=True, text=True, check=True, env={}, timeout=SECONDS)
    assert str(ROOT) not in found.stdout
    small = ("training.maxSteps=2", "checkpoint.everySteps=", "training.scheduler.warmupSteps=0")
    settings = [word for setting in small for word in ("--set", setting)]
    answer = installed.run("moejob", "run", "tiny-sft.yaml", *settings, **first_use)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    run = installed.folder / "runs" / "tiny-sft"
    assert len((run / "steps.jsonl").read_text().splitlines()) == 2
    assert "<html" in read_board(installed)
    assert installed.run("moejob", "report", str(run), "--html", "page.html").returncode == 0
    assert "<html" in (installed.folder / "page.html").read_text()


def read_board(installed: Installed) -> str:
    """Return the page that `moejob board` serves of the runs in the folder."""
    with subprocess.Popen(
        [installed.programs / "moejob", "board", "--port", "0"],
        cwd=installed.folder, env=installed.environment({}), stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        try:
            address = urllib.parse.urlsplit(server.stdout.readline().strip())
            connection = http.client.HTTPConnection(address.netloc, timeout=SECONDS)
            connection.request("GET", address.path or "/")
            return connection.getresponse().read().decode()
        finally:
            server.terminate()
