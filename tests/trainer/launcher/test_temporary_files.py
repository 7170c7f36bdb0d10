"""Temporary files of a launcher: all in one folder, which the next launcher removes where its owner was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import current_process, util
from pathlib import Path

import pytest

from moejob_trainer.launcher.temporary_files import launcher_folder
from trainer.launcher.launchers import Gang, await_result


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of temporary files, with a name as short as /tmp: those of tests leave a socket no room."""
    # Else the first to ask makes it in here.
    tmp_path_factory.getbasetemp()
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    # Launchers of tests are forked, and would inherit the folder that this process has made for itself.
    monkeypatch.setitem(current_process()._config, "tempdir", None)  # type: ignore[attr-defined] # noqa: SLF001
    yield folder
    shutil.rmtree(folder)


def test_files_of_multiprocessing_lie_in_the_folder_and_those_of_others_stay(parent: Path) -> None:
    with launcher_folder() as folder:
        assert folder.parent == parent
        assert Path(util.get_temp_dir()) == folder
        # What libraries have compiled serves the next start.
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(parent)
    assert [*parent.iterdir()] == []


def test_a_folder_whose_name_leaves_no_room_for_a_socket_is_not_for_multiprocessing(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = parent / ("x" * 85)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with launcher_folder() as folder:
        assert folder.parent == long
        assert current_process()._config["tempdir"] is None  # type: ignore[attr-defined] # noqa: SLF001


def test_the_next_launcher_removes_what_a_killed_one_left_and_nothing_of_a_living_one(
    parent: Path, gang: Callable[..., Gang]
) -> None:
    def folders() -> set[Path]:
        return {path for path in parent.glob("moejob-*") if path.is_dir()}

    job = gang(ranks=1)
    killed = job.start("work")
    job.rank_pids()
    (orphan,) = folders()
    # What its fork server listens at lies in there, too.
    assert [*orphan.glob("listener-*")]
    killed.kill()
    assert folders() == {orphan}
    job.start("work", attempt=2)
    (living,) = await_result(lambda: folders() - {orphan}, "another folder")
    await_result(lambda: not orphan.exists(), "the removal of what was left")
    other = gang(ranks=1)
    other.folder = job.folder / "other"
    other.folder.mkdir()
    other.start("work", attempt=1)
    other.rank_pids()
    assert living in folders()
    assert len(folders()) == 2
    assert {path.name.partition("-")[0] for path in parent.iterdir()} == {"moejob"}
