"""Check that lines of pages have at most 120 columns, so that a change of a sentence is a short diff.

Rows of tables, code blocks and blocks of measurements are free: a line break would change them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COLUMNS = 120
_FREE = re.compile(r"^ *```.*?^ *```|<!-- measured: start -->.*?<!-- measured: end -->", re.DOTALL | re.MULTILINE)
_TABLE_OR_CODE = re.compile(r"\s*\||    ")
# One link or one command, which has no place for a line break.
_UNBREAKABLE = re.compile(r"\s*(?:[-*] )?(?:\[[^\]]*\]\S+|\S*`[^`]*`\S*|\S+)")


def long_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield number and length of each line of a page that is too long."""
    prose = _FREE.sub(lambda free: "\n" * free.group().count("\n"), text)
    for number, line in enumerate(prose.splitlines(), 1):
        if len(line) > COLUMNS and not _TABLE_OR_CODE.match(line) and not _UNBREAKABLE.fullmatch(line):
            yield number, len(line)


def main() -> int:
    """Print every long line of the pages in the tree; 1 when there is one."""
    listed = subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True, check=True)
    problems = [
        f"{page}:{number}: {length} columns, at most {COLUMNS}"
        for page in listed.stdout.splitlines()
        if Path(page).is_file()
        for number, length in long_lines(Path(page).read_text(encoding="utf-8"))
    ]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
