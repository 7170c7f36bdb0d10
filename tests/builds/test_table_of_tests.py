"""`make test` tries every target, whatever becomes of those before it, and ends with a table that leaves none out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = {
    "test-operator": "tests/api",
    "test-trainer": "tests/trainer",
    "test-nodes": "tests/cluster/nodes",
    "test-cluster": "tests/cluster",
    "test-bridge": "tests/bridge",
    "test-rollout": "tests/rollout",
}
ENVIRONMENTS = ("operator", "trainer", "rollout", "peft", "trl", "mlflow")
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert 1 == 2\n"
SKIPS = "import pytest\n\n@pytest.mark.skip\ndef test_skips(): pass\n"
FAILS_ONCE = """from pathlib import Path

def test_fails_once():
    flag = Path("failed-once")
    was_there = flag.exists()
    flag.touch()
    assert was_there
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the Makefile of this one, and one passing test for each target."""
    for name in ("scripts", "requirements", "VERSION", "crds", "operator", "trainer", "rollout", "client", "cli"):
        (tmp_path / name).symlink_to(ROOT / name)
    # A copy: the file is a lock, too, which the run that this test belongs to holds.
    copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    for folder in ("cli", "operator", "chart", "builds"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    for folder in TARGETS.values():
        write_test(tmp_path, folder, PASSES)
    return tmp_path


def write_test(tree: Path, folder: str, text: str) -> None:
    (tree / folder).mkdir(parents=True, exist_ok=True)
    (tree / folder / f"test_{len(list((tree / folder).iterdir()))}.py").write_text(text)


def make_test(tree: Path, *, second_chance: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `make test` with the tools of this environment, which are there: nothing is built."""
    environment = {name: value for name, value in os.environ.items() if not re.match("MAKE|MFLAGS|PYTEST|MOEJOB", name)}
    if second_chance:
        environment["MOEJOB_SECOND_CHANCE"] = "1"
    there: Mapping[str, str] = {f"{name}_built": "" for name in ENVIRONMENTS}
    there = {**there, **{name: str(Path(sys.executable).parent) for name in ENVIRONMENTS[:3]}, **variables}
    command = [
        "make",
        "test",
        "ARGS=-n 0 --import-mode=importlib",
        *(f"{name}={value}" for name, value in there.items()),
    ]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def rows(output: str) -> dict[str, list[str]]:
    """Return the columns of each target's row, without the time."""
    lines = [re.split(r"\s+", line, maxsplit=5) for line in output.splitlines()]
    return {words[0]: [*words[1:4], *words[5:]] for words in lines if words[0] in TARGETS and len(words) > 4}


def test_a_target_that_fails_keeps_no_other_from_being_tried(tree: Path) -> None:
    write_test(tree, "tests/api", FAILS)
    write_test(tree, "tests/cluster", FAILS)
    write_test(tree, "tests/bridge", SKIPS)
    ended = make_test(tree)
    assert ended.returncode != 0
    assert rows(ended.stdout) == {
        "test-operator": ["1", "1", "0", "FAILED"],
        "test-trainer": ["1", "0", "0", "passed"],
        "test-nodes": ["1", "0", "0", "passed"],
        "test-cluster": ["1", "1", "0", "FAILED"],
        "test-bridge": ["1", "0", "1", "passed"],
        "test-rollout": ["1", "0", "0", "passed"],
    }
    assert re.findall("^failed: (.*)", ended.stdout, re.MULTILINE) == [
        "tests.api.test_1::test_fails",
        "tests.cluster.test_2::test_fails",
    ]


def test_a_target_that_ends_without_a_report_is_no_success(tree: Path) -> None:
    write_test(tree, "tests/trainer", "import os\n\ndef test_dies(): os._exit(0)\n")
    ended = make_test(tree, rollout="/nowhere")
    assert ended.returncode != 0
    seen = rows(ended.stdout)
    assert seen["test-trainer"] == ["0", "0", "0", "NO REPORT, status 0"]
    assert seen["test-rollout"] == ["0", "0", "0", "NO REPORT, status 127"]
    assert seen["test-bridge"] == ["1", "0", "0", "passed"]


def test_a_target_that_never_starts_is_in_the_table(tree: Path) -> None:
    (tree / ".venv").write_text("no folder, so no environment can be built in it")
    ended = make_test(tree, peft_built=".venv/peft/built")
    assert ended.returncode != 0
    assert rows(ended.stdout)["test-trainer"] == ["0", "0", "0", "DID NOT END"]
    assert rows(ended.stdout)["test-rollout"] == ["1", "0", "0", "passed"]


def test_what_passes_alone_has_passed_and_is_named(tree: Path) -> None:
    write_test(tree, "tests/rollout", FAILS_ONCE)
    ended = make_test(tree, second_chance=True)
    assert ended.returncode == 0
    assert rows(ended.stdout)["test-rollout"] == ["2", "0", "0", "passed, 1 alone"]
    assert "failed once, passed alone: tests.rollout.test_1::test_fails_once" in ended.stdout


def test_ci_fails_with_its_tests() -> None:
    """CI ends with the tests: what follows would hide how they ended."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert re.findall("^step (.*)", script, re.MULTILINE)[-1] == "test"
    assert "MOEJOB_SECOND_CHANCE=1" in script
