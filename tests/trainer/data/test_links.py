"""Links in folders that others may write: none leads out of a model or of data, and a hub's cache is read as before."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moejob_api.job.model import DataFormat, Dataset, Model
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_trainer.conversion.templates import copy_config_and_tokenizer
from moejob_trainer.data import tiny
from moejob_trainer.data.sources import read_records, source_files
from moejob_trainer.data.tokenizers import load_tokenizer
from moejob_trainer.errors import BadData
from moejob_trainer.model.pretrained import fetch_model

CONFIG = catalog.find_config("moejob/tiny-moe") or {}
ENVIRON = Path("/proc/self/environ")


def write_model(folder: Path) -> Path:
    """A model without weights."""
    tiny.build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _data(folder: Path) -> Dataset:
    return Dataset(source=str(folder), format=DataFormat.TEXT)


def copied(template: Path, target: Path) -> list[str]:
    """Names of the files that go beside exported weights."""
    target.mkdir()
    copy_config_and_tokenizer(template, target, shape_of(CONFIG), torch.float32)
    return sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda folder: fetch_model(Model(source=str(folder)), folder.parent), id="model"),
        pytest.param(lambda folder: load_tokenizer(str(folder)), id="tokenizer"),
        pytest.param(lambda folder: read_records(_data(folder)), id="data"),
        pytest.param(lambda folder: source_files(_data(folder)), id="files of data"),
        pytest.param(
            lambda folder: load_tokenizer(f"pvc://{folder.parent.name}/{folder.name}", claims=folder.parents[1]),
            id="claim",
        ),
    ],
)
@pytest.mark.parametrize("name", ["vocab.txt", "more/train.jsonl"])
def test_a_folder_with_a_link_out_of_it_is_refused(read: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "claim/model")
    (folder / "more").mkdir()
    (folder / name).symlink_to(ENVIRON)
    with pytest.raises(BadData, match=f"{name} leads to /proc/.*put the file itself there"):
        read(folder)


def test_links_inside_of_a_folder_and_to_it_are_followed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "v2")
    (folder / "tokenizer.json").rename(folder / "kept.json")
    (folder / "tokenizer.json").symlink_to("kept.json")
    (tmp_path / "latest").symlink_to(folder)
    assert load_tokenizer(str(tmp_path / "latest")).get_vocab() == tiny.build_tokenizer().get_vocab()
    assert "tokenizer.json" in copied(tmp_path / "latest", tmp_path / "export")
    assert not (tmp_path / "export/tokenizer.json").is_symlink()


def test_a_snapshot_in_the_cache_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    cached = tmp_path / "hub/models--team--tiny"
    snapshot, blobs = write_model(cached / "snapshots/0123abcd"), cached / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("../../blobs", str(number)))
    assert fetch_model(Model(source=str(snapshot)), tmp_path) == snapshot
    assert load_tokenizer(str(snapshot)).get_vocab() == tiny.build_tokenizer().get_vocab()
    assert copied(snapshot, tmp_path / "export") == sorted(path.name for path in snapshot.iterdir())
    (snapshot / "vocab.txt").symlink_to("../../../models--other--model/blobs/0")
    with pytest.raises(BadData, match=r"vocab\.txt leads to"):
        fetch_model(Model(source=str(snapshot)), tmp_path)


@pytest.mark.parametrize("link", ["tokenizer.model", "additional_chat_templates"])
def test_an_export_copies_no_file_from_elsewhere_though_its_link_came_after_the_check(
    link: str, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret.jinja").write_text("secret")
    folder = write_model(tmp_path / "model")
    (folder / link).symlink_to(elsewhere if link == "additional_chat_templates" else elsewhere / "secret.jinja")
    with pytest.raises(BadData, match="leads to"):
        copied(folder, tmp_path / "export")
    assert not any("secret" in path.read_text() for path in (tmp_path / "export").rglob("*") if path.is_file())


def test_an_export_copies_regular_files_of_known_names_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    expected = sorted(path.name for path in folder.iterdir())
    (folder / "additional_chat_templates").mkdir()
    for name in ("additional_chat_templates/tools.jinja", "additional_chat_templates/.netrc", "id_rsa"):
        (folder / name).write_text(name)
    (folder / "tokenizers").mkdir()
    os.mkfifo(folder / "merges.txt")
    assert copied(folder, tmp_path / "export") == sorted([*expected, "additional_chat_templates/tools.jinja"])


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda folder: fetch_model(Model(source=str(folder)), folder.parent), id="model"),
        pytest.param(lambda folder: load_tokenizer(str(folder)), id="tokenizer"),
        pytest.param(lambda folder: read_records(_data(folder)), id="data"),
    ],
)
@pytest.mark.parametrize("name", ["model/vocab.txt", "model/more", "model"])
def test_a_link_that_leads_to_itself_is_refused(read: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(link)
    with pytest.raises(BadData, match=f"{link} is a link that leads to itself; remove it"):
        read(tmp_path / "model")
