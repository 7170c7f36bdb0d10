"""`moejob push` against a hub on loopback, to which the hub's own client talks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from documented import ROOT
from trainer.hub import READER, WRITER, Hub, read_files, serve_hub

MOEJOB = ROOT / ".venv/operator/bin/moejob"
PYTHON = ROOT / ".venv/trainer/bin/python"
NAME = "team/tiny"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A run with an export of two shards, and files that are no part of it."""
    folder = tmp_path / "run" / "export"
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache" / "note").write_text("private")
    (tmp_path / "secret").write_text("private")
    (folder / "linked").symlink_to(tmp_path / "secret")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for shard in (1, 2):
        (folder / f"model-0000{shard}-of-00002.safetensors").write_bytes(bytes([shard]) * 300_000)
    return folder


def push(place: Path, environ: Mapping[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [MOEJOB, "push", place, "--to", NAME, *options],
        capture_output=True,
        text=True,
        check=False,
        env=kept | {"MOEJOB_TRAINER_PYTHON": str(PYTHON), **environ},
    )


def test_a_run_is_pushed_as_one_commit_of_its_exported_files(hub: Hub, export: Path, tmp_path: Path) -> None:
    environ = hub.environ(tmp_path / "home") | {"HF_TOKEN": WRITER}
    pushed = push(export.parent, environ, "-m", "Step 400")
    assert pushed.returncode == 0, pushed.stderr
    repository = hub.model(NAME)
    assert pushed.stdout == f"pushed {export} to {hub.url}/{NAME}/commit/{repository.main}\n"
    files = read_files(export)
    assert repository.commits[repository.main] == {
        name: files[name] for name in files if name != "linked" and not name.startswith(".")
    }
    assert [line for line in hub.asked if "/commit/" in line] == [f"POST /api/models/{NAME}/commit/main"]
    assert len([line for line in hub.asked if line.startswith("PUT")]) == 2
    # Weights that the hub has are not sent again.
    (export / "config.json").write_text('{"model_type": "qwen3"}')
    assert push(export, environ).returncode == 0
    assert len([line for line in hub.asked if line.startswith("PUT")]) == 2
    assert hub.model(NAME).commits[hub.model(NAME).main]["config.json"] == b'{"model_type": "qwen3"}'


@pytest.mark.parametrize(
    ("changes", "words", "is_asked"),
    [
        pytest.param({}, "there is no token of the hub; set HF_TOKEN", False, id="no token"),
        pytest.param({"HF_TOKEN": WRITER, "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set", False, id="offline"),
        pytest.param({"HF_TOKEN": "stale"}, "does not accept the token", True, id="a token that is refused"),
        pytest.param({"HF_TOKEN": READER}, f"the token may not write {NAME}", True, id="a token that only reads"),
        pytest.param(
            {"HF_TOKEN": WRITER, "HF_ENDPOINT": "http://127.0.0.1:1"}, "127.0.0.1:1 does not answer", False, id="no hub"
        ),
    ],
)
def test_what_cannot_be_pushed_is_refused_in_one_sentence(
    hub: Hub, export: Path, tmp_path: Path, changes: dict[str, str], words: str, is_asked: bool
) -> None:
    refused = push(export, hub.environ(tmp_path / "home") | changes)
    assert refused.returncode != 0
    assert refused.stderr.startswith("error: ")
    assert words in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert ("POST /api/repos/create" in hub.asked) is is_asked
    assert not any(line.startswith("PUT") for line in hub.asked)
    assert hub.model(NAME).commits == {}


def test_a_folder_without_a_model_is_refused_before_a_hub_is_asked(tmp_path: Path) -> None:
    refused = push(tmp_path, {})
    assert (refused.returncode, "holds no exported model" in refused.stderr) == (78, True)
