"""README's table of model families, against the tables that plan, webhook and trainer read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import model_table
from image_builds.recipes import ROOT
from model_table import README, SEEN, table_text, with_table
from moejob_api.models.shape import Family
from moejob_api.models.trainable import MEGATRON_FAMILIES

PAGE = README.read_text(encoding="utf-8")


def test_the_table_is_that_of_the_code() -> None:
    assert with_table(PAGE) == PAGE


def test_every_trained_family_has_a_row_and_no_other() -> None:
    [_, *named] = re.findall(r"^\| `(\w+)`", table_text(), re.MULTILINE)
    assert named == list(Family)


def test_the_proof_of_what_was_seen_is_there() -> None:
    pages = [page for words in SEEN.values() for page in re.findall(r"\]\(([^)]+)\)", words)]
    assert len(pages) >= len(SEEN)
    assert [page for page in pages if not (ROOT / page).exists()] == []


def test_a_family_that_changes_makes_the_page_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_table, "MEGATRON_FAMILIES", MEGATRON_FAMILIES - {Family.MIXTRAL})
    monkeypatch.setattr(model_table, "README", tmp_path / "README.md")
    monkeypatch.setattr("sys.argv", ["model_table.py", "--check"])
    (tmp_path / "README.md").write_text(PAGE, encoding="utf-8")
    assert model_table.main() == 1
    assert "run make generate" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["model_table.py"])
    assert model_table.main() == 0
    assert re.search(r"^\| `mixtral` \| [^|]+ \| no \|", (tmp_path / "README.md").read_text(), re.MULTILINE)
