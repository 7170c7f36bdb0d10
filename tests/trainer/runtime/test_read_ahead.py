"""Files are read as they are, in order, and asked for as far ahead as was said."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moejob_trainer.runtime import read_ahead as module
from moejob_trainer.runtime.read_ahead import FilePart, read_ahead, read_blocks

MISSING = Path("/none")


@pytest.mark.parametrize("size", [0, 1, 4096, 8192, 10_000])
def test_blocks_are_the_file(tmp_path: Path, size: int) -> None:
    content = bytes(number % 251 for number in range(size))
    (tmp_path / "file").write_bytes(content)
    found = [bytes(block) for block in read_blocks(tmp_path / "file", 4096)]
    assert b"".join(found) == content
    assert all(len(block) <= 4096 for block in found)


def test_parts_of_later_items_are_asked_for_while_they_are_no_more_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, pulled = list[int](), list[int]()
    monkeypatch.setattr(module, "ask", lambda part: asked.append(part.length))
    lengths = [3, 4, 50, 1, 1, 8, 2, 9]

    def items() -> Iterator[int]:
        for length in lengths:
            pulled.append(length)
            yield length

    found = [
        (item, len(pulled)) for item in read_ahead(items(), lambda item: [FilePart(MISSING, 0, item)], most_bytes=10)
    ]
    assert found == [(3, 3), (4, 3), (50, 4), (1, 7), (1, 7), (8, 8), (2, 8), (9, 8)]
    assert asked == lengths


def test_a_part_that_cannot_be_asked_for_is_no_failure() -> None:
    assert list(read_ahead([1, 2], lambda _: [FilePart(MISSING, 0, 10)])) == [1, 2]
