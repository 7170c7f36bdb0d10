"""Files are opened once for many reads, and again when much was read of them."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moejob_trainer.conversion import open_files as module
from moejob_trainer.conversion.open_files import OpenFiles

VALUES = torch.arange(12, dtype=torch.float32).view(4, 3)


@pytest.mark.parametrize(
    ("most_bytes", "opened"),
    [
        pytest.param(1000, ["a", "b"], id="each stays open"),
        # A row is 12 bytes; behind the third there are more than 30.
        pytest.param(30, ["a", "b", "b", "a"], id="closed behind 30 bytes"),
        pytest.param(0, ["a", "a", "b", "b", "a", "b"], id="closed behind each"),
    ],
)
def test_files_stay_open_until_more_was_read_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, opened: list[str]
) -> None:
    for name in ("a", "b"):
        save_file({"x": VALUES, "number": torch.tensor(7.0)}, tmp_path / name)
    seen, opens = list[str](), safe_open

    def noted(file: Path, framework: str) -> object:
        seen.append(file.name)
        return opens(file, framework)

    monkeypatch.setattr(module, "safe_open", noted)
    files = OpenFiles(most_bytes)
    for name, row in (("a", 0), ("a", 1), ("b", 3), ("b", 0), ("a", 2)):
        assert torch.equal(files.read_slice(tmp_path / name, "x", (slice(row, row + 1),)), VALUES[row : row + 1])
    assert files.read_slice(tmp_path / "b", "number", ()) == 7
    assert seen == opened
