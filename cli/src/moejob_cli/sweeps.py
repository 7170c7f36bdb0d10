"""Sweeps: `--set training.optimizer.learningRate=1e-5,3e-5` makes two jobs of one file, with names that say the values.

A comma divides values where YAML would not need it: `[1, 2]`, `{a: 1, b: 2}` and "a,b" in quotes are one value each.
Several lists make a job of each combination.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from pydantic import JsonValue

from moejob_api.documents.reading import parse_job, read_file_tree
from moejob_api.documents.settings import parse_setting, with_settings
from moejob_api.job import MAX_NAME, MoETrainingJob
from moejob_api.problems import InvalidSpec, Problem, Rule

MOST_JOBS = 32
_OPENING, _CLOSING, _QUOTES = "[{", "]}", "\"'"
_WORD = re.compile(r"[A-Za-z0-9]+")
_CAPITAL = re.compile(r"[A-Z]")
_NAME = "metadata.name"


@dataclass(frozen=True, slots=True)
class SweptJob:
    """The settings of one job of a sweep; `suffix` says its values, and is empty where there is one job."""

    settings: tuple[str, ...]
    suffix: str


def is_sweep(settings: Sequence[str]) -> bool:
    """Return whether a setting has several values."""
    return any(len(split_values(setting.partition("=")[2])) > 1 for setting in settings)


def read_sweep(file: str, settings: Sequence[str]) -> tuple[MoETrainingJob, ...]:
    """Return the jobs of a file under settings of which some have several values. InvalidSpec for names that clash."""
    swept_jobs = expand_sweep(settings)
    tree = read_file_tree(file)
    jobs = tuple(_read_swept_job(tree, swept_job) for swept_job in swept_jobs)
    names = [job.metadata.name for job in jobs]
    repeated_name = next((name for name in names if names.count(name) > 1), None)
    if repeated_name is not None:
        raise _sweep_error(f"two jobs would be named {repeated_name}; give values that differ in letters or digits")
    return jobs


def expand_sweep(settings: Sequence[str]) -> tuple[SweptJob, ...]:
    """Return the settings of every combination of values, the last list fastest.

    `a.maxSteps=1,2` and `seed=7,8` are ms-1-seed-7, ms-1-seed-8, ms-2-seed-7, ms-2-seed-8.
    """
    choices = [_setting_choices(setting) for setting in settings]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MOST_JOBS:
        raise _sweep_error(f"makes {count} jobs, and {MOST_JOBS} is the most; give fewer values")
    return tuple(
        SweptJob(tuple(setting for setting, _ in combination), "-".join(word for _, word in combination if word))
        for combination in product(*choices)
    )


def split_values(text: str) -> list[str]:
    """Divide a value at its commas, but not within brackets and quotes."""
    values, quote, depth = [""], "", 0
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES and not values[-1].strip():
            quote = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        elif letter == "," and depth == 0:
            values.append("")
            continue
        values[-1] += letter
    return values


def _setting_choices(setting: str) -> list[tuple[str, str]]:
    """Return a setting for each of its values, and the word of a name that says it; no word for a single value."""
    path, equals, text = setting.partition("=")
    values = split_values(text)
    if len(values) == 1:
        return [(setting, "")]
    if path.strip() == _NAME:
        raise _sweep_error(f"--set {setting}: the names of a sweep are made of its values; sweep another field")
    field = _field_word(path)
    return [(f"{path}{equals}{value}", f"{field}-{_value_word(value)}") for value in values]


def _field_word(path: str) -> str:
    """Return a short word for a field: its own, or the initials of several. training.optimizer.learningRate is lr."""
    name: str = _WORD.findall(path)[-1]
    initials = name[0] + "".join(_CAPITAL.findall(name[1:]))
    return (initials if len(initials) > 1 else name).lower()


def _value_word(value: str) -> str:
    return "-".join(_WORD.findall(value)).lower() or "none"


def _read_swept_job(tree: dict[str, JsonValue], swept_job: SweptJob) -> MoETrainingJob:
    document = with_settings(tree, [parse_setting(setting) for setting in swept_job.settings])
    metadata = document.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("name"), str):
        name = f"{metadata['name']}-{swept_job.suffix}"
        if len(name) > MAX_NAME:
            longest = MAX_NAME - len(swept_job.suffix) - 1
            fix = f"set {_NAME} to {longest} characters or less" if longest > 0 else "sweep fewer fields"
            raise _sweep_error(f"a job would be named {name}, and a name has {MAX_NAME} characters at most; {fix}")
        metadata["name"] = name
    return parse_job(document)


def _sweep_error(message: str) -> InvalidSpec:
    return InvalidSpec((Problem(Rule.UNREADABLE, "--set", message),))


def overlay_words(command: str, places: Sequence[object]) -> str:
    """Return the words that say how to see the runs of a sweep beside each other."""
    names = " ".join(map(str, places))
    return f"`{command} {names}` overlays their curves; `moejob compare {names}` says how they differ"
