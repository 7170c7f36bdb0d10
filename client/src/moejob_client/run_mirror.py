"""A copy of the run folder's small files on this machine, which grows with them: what the page of a run reads.

Checkpoints and exports stay where they are. Step logs are read on from where the last reading ended.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moejob_api.contract.names import RunFile
from moejob_client.job_files import extract_files

if TYPE_CHECKING:
    from moejob_client.job_volume import JobVolume

# Lines are only added to these.
_GROWING = (RunFile.STEPS, RunFile.EXPERTS)
# Read as a whole each time: the record is bounded by its launchers.
_CHANGING = (RunFile.OWNER, RunFile.SPEC, f"{RunFile.RECORD}/attempt-*/*.jsonl")
_SAMPLE_FILE = re.compile(r"samples/(?:eval-)?step-([0-9]{1,12})\.jsonl")
MOST_SAMPLE_FILES = 40


@dataclass(slots=True)
class RunMirror:
    """The copy of one run folder."""

    folder: Path
    _samples: set[str] = field(init=False, default_factory=set)

    async def refresh_files(self, volume: JobVolume) -> None:
        """Read what was added since the last time."""
        for name in _GROWING:
            await self._read_new_lines(volume, name)
        names = _newest_samples(await volume.list_files(["samples/*.jsonl"])) - self._samples
        await extract_files(volume, [*_CHANGING, *sorted(names)], self.folder)
        self._samples |= names

    async def _read_new_lines(self, volume: JobVolume, name: str) -> None:
        path, incomplete = self.folder / name, b""
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            async with aclosing(volume.read_file(name, offset)) as chunks:
                async for chunk in chunks:
                    # A start may cut half a line, so only whole lines count as read.
                    lines, end, incomplete = (incomplete + chunk).rpartition(b"\n")
                    file.write(lines + end)


def _newest_samples(names: list[str]) -> set[str]:
    matches = [match for match in map(_SAMPLE_FILE.fullmatch, names) if match is not None]
    newest = sorted(matches, key=lambda match: int(match[1]))[-MOST_SAMPLE_FILES:]
    return {match[0] for match in newest}
