"""Show prompts, answers and rewards of a GRPO run, of its first step and of its last: answers.py RUN_FOLDER."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

SHOWN = 6


def sample_lines(run: Path) -> Iterator[str]:
    """Yield every line of the table."""
    files = sorted((run / "samples").glob("step-*.jsonl"), key=lambda file: int(file.stem.removeprefix("step-")))
    for file in (files[0], files[-1]):
        yield f"{file.stem.replace('-', ' ')}"
        samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        # One answer of each group: all answers of a group have the same prompt.
        for sample in [sample for sample in samples if sample["member"] == 0][:SHOWN]:
            yield f"  {sample['prompt']} {sample['answer']!r:8} reward {sample['reward']:g}"


if __name__ == "__main__":
    for line in sample_lines(Path(sys.argv[1])):
        sys.stdout.write(f"{line}\n")
