"""Steps and answers of a job's run folder, for a person or as one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import typer

from moejob_api.contract.texts import escaped_lines, escaped_text
from moejob_cli.exits import CommandExit
from moejob_cli.notices import print_notice
from moejob_client.jobs import AsyncClient

# Columns that are shown where the first step has them.
_COLUMNS = ("step", "loss", "reward", "gradNorm", "learningRate", "seconds", "evalLoss", "tokensPerSecondPerGpu")
_WIDTH = 14
_SAMPLE_TEXTS = ("prompt", "answer")


async def print_steps(jobs: AsyncClient, name: str, *, is_json: bool) -> CommandExit:
    """Print the step log."""
    columns: tuple[str, ...] = ()
    async with aclosing(jobs.steps(name, report=print_notice)) as steps:
        async for step in steps:
            if is_json:
                typer.echo(json.dumps(step))
                continue
            if not columns:
                columns = tuple(name for name in _COLUMNS if name in step)
                typer.echo("".join(name.ljust(_WIDTH) for name in columns).rstrip())
            typer.echo("".join(_number_text(step.get(name)).ljust(_WIDTH) for name in columns).rstrip())
    return CommandExit.ACCEPTED


async def print_samples(
    jobs: AsyncClient, name: str, step: int | None, *, is_evaluation: bool, is_json: bool
) -> CommandExit:
    """Print answers with their rewards."""
    samples: AsyncGenerator[dict[str, Any]] = jobs.samples(name, step, is_evaluation=is_evaluation, report=print_notice)
    async with aclosing(samples):
        async for sample in samples:
            typer.echo(json.dumps(sample) if is_json else "\n".join(_sample_lines(sample)))
    return CommandExit.ACCEPTED


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
