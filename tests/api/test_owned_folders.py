"""Folders of processes that were killed go at the next start; those of living ones never do."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moejob_api.owned_folders import owned_folder, sweep_orphans

# Owns a folder until its input ends.
OWNER = """
import sys
from pathlib import Path
from moejob_api.owned_folders import owned_folder
with owned_folder("run-", Path(sys.argv[1])) as folder:
    (folder / "file").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""
Owner = tuple[subprocess.Popen[str], Path]


class Owners:
    """Processes that own folders."""

    def __init__(self, parent: Path) -> None:
        self.parent, self.processes = parent, list[subprocess.Popen[str]]()

    def start(self) -> Owner:
        command = [sys.executable, "-c", OWNER, str(self.parent)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    made = Owners(tmp_path)
    yield made
    made.close()


def test_a_folder_goes_with_its_owner(tmp_path: Path) -> None:
    with owned_folder("run-", tmp_path) as folder:
        (folder / "file").write_text("")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert [*tmp_path.iterdir()] == []


def test_the_next_start_removes_what_a_killed_one_left_and_nothing_of_a_living_one(
    tmp_path: Path, owners: Owners
) -> None:
    killed, orphan = owners.start()
    _, living = owners.start()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (orphan / "file").exists()
    _, third = owners.start()
    assert not orphan.exists()
    assert (living / "file").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        name for folder in (living, third) for name in (folder.name, f"{folder.name}.lock")
    )


def test_what_is_of_another_prefix_or_has_no_owner_stays(tmp_path: Path) -> None:
    for name in ("run-of-an-older-version", "other-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "other-1.lock").write_text("")
    sweep_orphans("run-", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-1", "other-1.lock", "run-of-an-older-version"]


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "run-1").symlink_to(tmp_path / "precious")
    (tmp_path / "run-1.lock").write_text("")
    (tmp_path / "run-2.lock").symlink_to(tmp_path / "precious")
    sweep_orphans("run-", tmp_path)
    assert (tmp_path / "precious").is_dir()
