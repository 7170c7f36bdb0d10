"""Steps and answers of a run folder, on a volume or on this machine, for a person or as one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import typer

from moejob_api.contract.names import RunFile
from moejob_api.contract.texts import escaped_lines, escaped_text
from moejob_cli.exits import CommandExit
from moejob_cli.notices import print_notice
from moejob_client.failures import JobRequestError, RequestFailure
from moejob_client.job_files import choose_samples, parse_object
from moejob_client.jobs import AsyncClient

# Columns that are shown where the first step has them.
_COLUMNS = ("step", "loss", "reward", "gradNorm", "learningRate", "seconds", "evalLoss", "tokensPerSecondPerGpu")
_WIDTH = 14
_SAMPLE_TEXTS = ("prompt", "answer")


async def print_steps(steps: AsyncGenerator[dict[str, Any]], *, is_json: bool) -> CommandExit:
    """Print the step log."""
    columns: tuple[str, ...] = ()
    async with aclosing(steps):
        async for step in steps:
            if is_json:
                typer.echo(json.dumps(step))
                continue
            if not columns:
                columns = tuple(name for name in _COLUMNS if name in step)
                typer.echo("".join(name.ljust(_WIDTH) for name in columns).rstrip())
            typer.echo("".join(_number_text(step.get(name)).ljust(_WIDTH) for name in columns).rstrip())
    return CommandExit.ACCEPTED


async def print_samples(samples: AsyncGenerator[dict[str, Any]], *, is_json: bool) -> CommandExit:
    """Print answers with their rewards."""
    async with aclosing(samples):
        async for sample in samples:
            typer.echo(json.dumps(sample) if is_json else "\n".join(_sample_lines(sample)))
    return CommandExit.ACCEPTED


def read_run_steps(folder: Path) -> AsyncGenerator[dict[str, Any]]:
    """Yield the step log of a run of this machine."""
    return _yield_all(_read_objects(folder / RunFile.STEPS))


def read_run_samples(folder: Path, step: int | None, *, is_evaluation: bool) -> AsyncGenerator[dict[str, Any]]:
    """Yield the answers of a step of a run of this machine, or of the newest step that has any."""

    def read_chosen() -> Iterator[dict[str, Any]]:
        names = (str(path.relative_to(folder)) for path in folder.glob("samples/*.jsonl"))
        chosen, path = choose_samples(names, step, is_evaluation=is_evaluation)
        yield from ({"step": chosen, **sample} for sample in _read_objects(folder / path))

    return _yield_all(read_chosen())


async def _yield_all(values: Iterable[dict[str, Any]]) -> AsyncGenerator[dict[str, Any]]:
    for value in values:
        yield value


def _read_objects(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as lines:
            yield from filter(None, map(parse_object, lines))
    except OSError as error:
        raise JobRequestError(RequestFailure.NO_FILE, f"{path} cannot be read: {error.strerror}") from error


async def copy_files(jobs: AsyncClient, name: str, path: str, target: Path) -> CommandExit:
    """Copy files of the run folder, and say how many."""
    count = await jobs.copy(name, path, target, report=print_notice)
    typer.echo(f"{target}: {count} files")
    return CommandExit.ACCEPTED


async def fetch_export(jobs: AsyncClient, name: str, target: Path, *, to_megatron: bool) -> CommandExit:
    """Copy the exported model of a job, and say how many files it has."""
    count = await jobs.export(name, target, to_megatron=to_megatron, report=print_notice)
    typer.echo(f"{target}: {count} files")
    return CommandExit.ACCEPTED


def _sample_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers of an answer in a line, then its texts."""
    numbers = (f"{key} {_number_text(value)}" for key, value in sample.items() if isinstance(value, int | float | bool))
    yield f"--- {'  '.join(numbers)}"
    for key in _SAMPLE_TEXTS:
        if key in sample:
            text = sample[key] if isinstance(sample[key], str) else json.dumps(sample[key], ensure_ascii=False)
            yield f"{key}: {escaped_lines(text)}"


def _number_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else escaped_text(str(value))
