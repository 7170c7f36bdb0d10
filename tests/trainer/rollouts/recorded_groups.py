"""Records of the groups that a GRPO run trained on and those that its checkpoints hold: what became of every prompt.

As a program, for tests whose Python has no NumPy: `python -m trainer.rollouts.recorded_groups FOLDER... STEPS`, with
the folders of the jobs that a run went through.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from moejob_trainer.checkpoints.names import MARKER, parse_step_folder
from moejob_trainer.distributed.encoding import Array


@dataclass(frozen=True)
class RecordedGroup:
    """A group that a step took, with all that was saved of it."""

    number: int
    step: int
    contents: tuple[bytes, ...]


def group_contents(*columns: Array) -> tuple[bytes, ...]:
    return tuple(column.tobytes() for column in columns)


def recorded_groups(record: Mapping[str, Array], step: int) -> list[RecordedGroup]:
    ends = np.cumsum(record["answer.length"])
    groups = []
    for place, number in enumerate(record["group.number"].tolist()):
        answers = np.flatnonzero(record["answer.group"] == place)
        tokens = slice(ends[answers[0]] - record["answer.length"][answers[0]], ends[answers[-1]])
        columns = (record[name][tokens] for name in ("token.id", "token.engine", "token.version"))
        groups.append(RecordedGroup(number, step, group_contents(*columns, record["answer.reward"][answers])))
    return groups


@dataclass(frozen=True)
class SavedState:
    """The groups and prompts of a checkpoint."""

    step: int
    # Prompts that were drawn before it.
    drawn: int
    unfinished: tuple[int, ...]
    finished: Mapping[int, tuple[bytes, ...]]


def read_state(checkpoint: Path) -> SavedState:
    entry = json.loads((checkpoint / "run-state.json").read_text())
    objective, path = entry["objective"], checkpoint / "objective-state.safetensors"
    arrays = load_file(path) if path.exists() else {}
    finished: dict[int, tuple[bytes, ...]] = {}
    answer = token = 0
    for number, count in zip(arrays.get("group.number", ()), arrays.get("group.answers", ()), strict=True):
        answers = slice(answer, answer + count)
        length = int(arrays["answer.tokens"][answers].sum())
        columns = (arrays[f"token.{name}"][token : token + length] for name in ("id", "logProbability", "version"))
        finished[int(number)] = group_contents(*columns, arrays["answer.reward"][answers])
        answer, token = answer + count, token + length
    return SavedState(
        entry["step"],
        sum(json.loads(objective["cursor"])["taken"]),
        tuple(number for number, *_ in objective.get("unfinishedPrompts", ())),
        finished,
    )


def read_groups(folder: Path, steps: int) -> list[RecordedGroup]:
    """Return the groups of all steps of a run, in order."""
    return [group for step in range(1, steps + 1) for group in read_step(step, (folder,))]


def read_step(step: int, folders: Sequence[Path]) -> list[RecordedGroup]:
    """Return the groups of a step, which the newest of the jobs that have done it has recorded."""
    paths = [path for folder in folders if (path := folder / f"tokens/step-{step}.safetensors").exists()]
    return recorded_groups(load_file(paths[-1]), step)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the one to resume from last."""
    folders = [(parse_step_folder(path.name), path) for path in (folder / "checkpoints").glob("step-*")]
    complete = [(name, path) for name, path in folders if name is not None and (path / MARKER).exists()]
    return [path for _, path in sorted(complete)]


def require_nothing_lost(folders: Sequence[Path], steps: int) -> None:
    """Every prompt that was drawn was taken by one step, or is in the last checkpoint; so it was at each of them."""
    groups = [group for step in range(1, steps + 1) for group in read_step(step, folders)]
    checkpoints = [checkpoint for folder in folders for checkpoint in complete_checkpoints(folder)]
    newest = {state.step: state for state in map(read_state, checkpoints)}
    assert [*newest] == [*range(1, steps + 1)]
    for state in newest.values():
        taken = [group.number for group in groups if group.step <= state.step]
        assert Counter([*taken, *state.unfinished, *state.finished]) == Counter(range(state.drawn)), state.step


if __name__ == "__main__":
    require_nothing_lost([Path(folder) for folder in sys.argv[1:-1]], int(sys.argv[-1]))
