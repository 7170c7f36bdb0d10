"""A model in the cache of a volume is what the hub says, for all that other jobs write there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from moejob_api.job.status import RepositoryKind
from moejob_trainer.data.hub import WEIGHT_FILES, HubPins
from trainer.hub import Hub, serve_hub
from trainer.rows import make_rows

MODEL = "team/tiny"
# Beyond what is hashed at each start.
LARGE = bytes(65 << 20)
FILES = {"config.json": b"{}", "marked.py": b"print()", "model.safetensors": LARGE, "code/deep.py": b"1"}
# In a process of its own: the hub's library reads its address when it is imported.
FETCH = """
import os, sys
from pathlib import Path
from moejob_trainer.data.hub import HubPins, download_model
from moejob_trainer.errors import BadConfiguration
try:
    print(download_model(sys.argv[1], None, HubPins(Path(sys.argv[2])), sys.argv[3:]))
except BadConfiguration as refusal:
    sys.exit(f"refused: {refusal}")
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as found:
        found.model(MODEL).push(FILES)
        yield found


def fetched(hub: Hub, volume: Path, job: str = "job", left_out: Sequence[str] = ()) -> str:
    """Return the folder that a job starts from, or what it is refused with."""
    (volume / job).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", FETCH, MODEL, volume / job, *left_out],
        env=hub.environ(volume / "home") | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or "refused: " in done.stderr, done.stderr
    return done.stdout.strip() if done.returncode == 0 else done.stderr.partition("refused: ")[2]


def files(volume: Path) -> dict[str, str]:
    """The digests that a run keeps."""
    pin = HubPins(volume / "job").find_pin(RepositoryKind.MODEL, MODEL)
    assert pin is not None
    return {path: file.digest for path, file in pin.files.items()}


def write(path: Path, content: bytes) -> None:
    """Change a file of the cache in its place."""
    path.resolve().write_bytes(content)


def renamed(path: Path, content: bytes) -> None:
    """Change it as one who knows how a cache names its files."""
    blob = path.resolve().with_name("0" * (64 if path.suffix == ".safetensors" else 40))
    blob.write_bytes(content)
    path.unlink()
    path.symlink_to(blob)


def added(path: Path, content: bytes) -> None:
    """Leave a file beside those of the commit."""
    path.with_name("sitecustomize.py").write_bytes(content)


CHANGES: list[Callable[[Path, bytes], None]] = [write, renamed, added]
NAMES = ("marked.py", "model.safetensors")


def test_a_run_keeps_what_the_hub_says_of_each_file(hub: Hub, tmp_path: Path) -> None:
    fetched(hub, tmp_path)
    kept = files(tmp_path)
    assert kept.keys() == FILES.keys()
    assert {path: len(digest) for path, digest in kept.items()} == {
        "config.json": 40, "marked.py": 40, "code/deep.py": 40, "model.safetensors": 64,
    }  # fmt: skip
    assert fetched(hub, tmp_path) == fetched(hub, tmp_path, "another"), "they share a cache"


@pytest.mark.parametrize(
    ("name", "change"),
    make_rows(product(NAMES, CHANGES), [("marked.py", renamed), ("marked.py", added), ("model.safetensors", write)]),
)
def test_a_file_that_another_job_has_changed_is_refused(
    hub: Hub, tmp_path: Path, name: str, change: Callable[[Path, bytes], None]
) -> None:
    folder = Path(fetched(hub, tmp_path))
    change(folder / name, b"import os")
    refusal = fetched(hub, tmp_path, "another")
    assert str(folder) in refusal
    assert "delete" in refusal
    # A run that knows its files needs no hub to see it.
    hub.repositories.clear()
    assert fetched(hub, tmp_path) == refusal


def test_a_file_that_is_missing_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    folder = Path(fetched(hub, tmp_path))
    for path in ("marked.py", "model.safetensors"):
        (folder / path).resolve().unlink()
    assert fetched(hub, tmp_path) == str(folder)
    assert (folder / "model.safetensors").read_bytes() == LARGE


def test_files_that_were_cut_before_a_download_ended_are_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    hub.lost = {"model.safetensors"}
    assert "cannot be had from the Hugging Face hub" in fetched(hub, tmp_path)
    hub.lost = set()
    # What a loss of power leaves of a file that has its name already.
    (blob,) = (tmp_path / "hub/models--team--tiny/snapshots").glob("*/marked.py")
    blob.resolve().write_bytes(b"")
    folder = Path(fetched(hub, tmp_path))
    assert {path: (folder / path).read_bytes() for path in FILES} == FILES
    assert not list(folder.parents[1].glob(".moejob-*"))


def test_files_that_another_run_downloads_are_left_alone(hub: Hub, tmp_path: Path) -> None:
    folder = Path(fetched(hub, tmp_path))
    mark, blob = folder.parents[1] / ".moejob-downloading-other", (folder / "model.safetensors").resolve()
    mark.touch()
    before = blob.stat()
    assert fetched(hub, tmp_path, "another") == str(folder)
    assert (mark.exists(), blob.stat().st_mtime_ns) == (True, before.st_mtime_ns)


def test_config_and_tokenizer_come_without_weights_and_are_enough_when_the_hub_is_gone(
    hub: Hub, tmp_path: Path
) -> None:
    folder = Path(fetched(hub, tmp_path, left_out=WEIGHT_FILES))
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "config.json", "marked.py", "code/deep.py",
    }  # fmt: skip
    repositories = dict(hub.repositories)
    hub.repositories.clear()
    assert fetched(hub, tmp_path, left_out=WEIGHT_FILES) == str(folder)
    hub.repositories.update(repositories)
    # Another job of the volume wants the weights too.
    assert fetched(hub, tmp_path, "another") == str(folder)
    assert (folder / "model.safetensors").read_bytes() == LARGE


def test_weights_that_were_not_written_since_are_not_hashed_again(hub: Hub, tmp_path: Path) -> None:
    folder = Path(fetched(hub, tmp_path))
    pins = HubPins(tmp_path / "job")
    pin = pins.find_pin(RepositoryKind.MODEL, MODEL)
    assert pin is not None
    # Were it hashed, it would be refused.
    wrong = pin.files["model.safetensors"].model_copy(update={"digest": "0" * 64})
    pins.record_pin(pin.model_copy(update={"files": pin.files | {"model.safetensors": wrong}}))
    assert fetched(hub, tmp_path) == str(folder)
    (folder / "model.safetensors").resolve().touch()
    assert "0" * 64 in fetched(hub, tmp_path)


def test_a_run_that_kept_no_files_asks_the_hub_for_them(hub: Hub, tmp_path: Path) -> None:
    fetched(hub, tmp_path)
    pins, before = HubPins(tmp_path / "job"), files(tmp_path)
    pin = pins.find_pin(RepositoryKind.MODEL, MODEL)
    assert pin is not None
    pins.record_pin(pin.model_copy(update={"files": {}}))
    fetched(hub, tmp_path)
    assert files(tmp_path) == before


@pytest.mark.parametrize("is_damaged", [True, False])
def test_without_the_hub_damage_is_found_by_the_names_in_the_cache(hub: Hub, tmp_path: Path, is_damaged: bool) -> None:
    folder = Path(fetched(hub, tmp_path))
    if is_damaged:
        write(folder / "model.safetensors", b"other weights")
    hub.repositories.clear()
    assert ("model.safetensors has the digest" in fetched(hub, tmp_path, "another")) == is_damaged


# --- runs that continue others ----------------------------------------------------------------------------------------


def test_a_run_that_continues_another_has_its_commits_and_keeps_its_own(hub: Hub, tmp_path: Path) -> None:
    first = fetched(hub, tmp_path)
    hub.model(MODEL).push({**FILES, "config.json": b"[]"})
    (tmp_path / "next").mkdir()
    HubPins(tmp_path / "next").inherit_pins(tmp_path / "job")
    assert fetched(hub, tmp_path, "next") == first
    second = fetched(hub, tmp_path, "another")
    assert second != first
    HubPins(tmp_path / "another").inherit_pins(tmp_path / "job")
    assert fetched(hub, tmp_path, "another") == second


def test_a_run_without_commits_has_none_to_give(tmp_path: Path) -> None:
    pins = HubPins(tmp_path / "next")
    pins.inherit_pins(tmp_path / "job")
    assert not pins.file.exists()
