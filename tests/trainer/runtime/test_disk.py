"""Names that are given only to what is durable, and content that storage changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moejob_trainer.runtime.disk import ChangedContent, Disk, cut_half_line, keep_folder, publish_folder, replace_file


@dataclass
class WatchedDisk(Disk):
    """Notes what was durable when a name was given."""

    synced: set[Path] = field(default_factory=set)
    # By new name: what of it was not durable at that moment.
    lost: dict[str, list[str]] = field(default_factory=dict)

    def sync(self, path: Path) -> None:
        super().sync(path)
        self.synced.add(path)

    def rename(self, source: Path, target: Path) -> None:
        everything = [source, *(source.rglob("*") if source.is_dir() else ())]
        self.lost[target.name] = [str(path) for path in everything if path not in self.synced]
        super().rename(source, target)
        self.synced.discard(target.parent)


class LossyDisk(Disk):
    """Storage that answers that it has what it lost."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if source.name.endswith("unfinished"):
            (target / "config.json").write_bytes(b"")


def written(folder: Path, text: str = "{}") -> None:
    (folder / "inner").mkdir(parents=True)
    (folder / "config.json").write_text(text)
    (folder / "inner/chat.jinja").write_text("template")


def test_a_file_has_its_name_only_when_it_is_durable(tmp_path: Path) -> None:
    disk = WatchedDisk()
    replace_file(disk, tmp_path / "hub.json", b"{}")
    assert disk.lost == {"hub.json": []}
    assert tmp_path in disk.synced


def test_a_folder_has_its_name_only_when_all_of_it_is_durable(tmp_path: Path) -> None:
    disk = WatchedDisk()
    written(tmp_path / ".export.unfinished")
    publish_folder(disk, tmp_path / ".export.unfinished", tmp_path / "export")
    assert disk.lost == {"export": []}
    assert tmp_path in disk.synced
    assert (tmp_path / "export/inner/chat.jinja").read_text() == "template"


def test_an_older_folder_goes_when_the_new_one_has_its_name(tmp_path: Path) -> None:
    written(tmp_path / "export", "old")
    written(tmp_path / "unfinished", "new")
    publish_folder(Disk(), tmp_path / "unfinished", tmp_path / "export")
    assert (tmp_path / "export/config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_older_folder_stays_when_storage_lost_a_file_of_the_new_one(tmp_path: Path) -> None:
    written(tmp_path / "export", "old")
    written(tmp_path / "unfinished", "new")
    with pytest.raises(ChangedContent, match="read back with other bytes"):
        publish_folder(LossyDisk(), tmp_path / "unfinished", tmp_path / "export")
    assert (tmp_path / "export/config.json").read_text() == "old"


def test_a_folder_that_is_the_same_stays(tmp_path: Path) -> None:
    keep_folder(Disk(), tmp_path / "template", lambda folder: written(folder / "below"))
    before = (tmp_path / "template").stat().st_ino
    keep_folder(Disk(), tmp_path / "template", lambda folder: written(folder / "below"))
    assert (tmp_path / "template").stat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == ["template"]


@pytest.mark.parametrize("damage", ["empty", "missing", "more"])
def test_a_folder_that_a_loss_of_power_damaged_is_laid_out_again(tmp_path: Path, damage: str) -> None:
    keep_folder(Disk(), tmp_path / "template", lambda folder: written(folder / "below"))
    match damage:
        case "empty":
            (tmp_path / "template/below/config.json").write_bytes(b"")
        case "missing":
            (tmp_path / "template/below/config.json").unlink()
        case _:
            (tmp_path / "template/below/other.json").write_text("{}")
    keep_folder(Disk(), tmp_path / "template", lambda folder: written(folder / "below"))
    files = {path.name for path in (tmp_path / "template").rglob("*") if path.is_file()}
    assert files == {"config.json", "chat.jinja"}
    assert (tmp_path / "template/below/config.json").read_text() == "{}"


FIRST, SECOND = b'{"step": 1}\n', b'{"step": 2}\n'


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        pytest.param(FIRST + SECOND, FIRST + SECOND, id="whole"),
        pytest.param(b"", b"", id="empty"),
        pytest.param(FIRST + SECOND[:-1], FIRST, id="a line without its end"),
        pytest.param(FIRST + SECOND[:4], FIRST, id="half a line"),
        pytest.param(SECOND[:4], b"", id="nothing but half a line"),
        pytest.param(FIRST + bytes(5000), FIRST, id="zeros"),
        pytest.param(FIRST + SECOND + bytes(40) + b"\n", FIRST + SECOND, id="zeros and the end of a line"),
        pytest.param(FIRST + SECOND[:4] + b"\n" + bytes(3) + b"\n", FIRST, id="two broken lines"),
    ],
)
def test_what_a_loss_of_power_leaves_of_a_log_is_cut_behind_its_last_whole_line(
    tmp_path: Path, content: bytes, kept: bytes
) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_bytes(content)
    assert cut_half_line(Disk(), log) == content[len(kept) :]
    assert log.read_bytes() == kept


def test_a_log_that_is_not_there_is_left_alone(tmp_path: Path) -> None:
    assert cut_half_line(Disk(), tmp_path / "steps.jsonl") == b""
    assert not [*tmp_path.iterdir()]
