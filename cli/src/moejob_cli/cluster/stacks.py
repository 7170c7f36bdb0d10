"""The lines of `moejob stacks`: ranks with the same stacks together, the smallest group first.

Of a thousand ranks, 999 wait for one: the few that differ are what is looked for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from moejob_api.contract.stacks import STACKS_MODULE, RankStacks, parse_stacks_line, stacks_document
from moejob_api.contract.texts import escaped_text
from moejob_cli.exits import CommandExit
from moejob_client.jobs import AsyncClient
from moejob_client.rank_stacks import PodStacks

# Differs by rank, and says nothing. `Current` is the thread that took the signal, which may be any.
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+")


async def print_job_stacks(jobs: AsyncClient, name: str, *, is_json: bool) -> CommandExit:
    """Print the stacks of all ranks of a job."""
    async with aclosing(jobs.stacks(name)) as stacks:
        pods = [pod async for pod in stacks]
    return _print_pods(pods, is_json=is_json)


def print_run_stacks(folder: Path, *, is_json: bool, environ: Mapping[str, str] = os.environ) -> CommandExit:
    """Print the stacks of all ranks of a run of this machine."""
    from moejob_cli.running.machine import CannotRun, installed_trainer  # noqa: PLC0415 a job of a cluster needs none

    try:
        python = installed_trainer(environ)
    except CannotRun as refused:
        typer.echo(f"error: {refused}", err=True)
        return CommandExit.REFUSED
    command = [str(python), "-m", STACKS_MODULE, "--run-folder", str(folder.absolute())]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(environ))
    if process.returncode:
        typer.echo(f"error: {escaped_text(process.stderr.strip())}", err=True)
        return CommandExit.REFUSED
    ranks = tuple(filter(None, map(parse_stacks_line, process.stdout.splitlines())))
    if not ranks:
        typer.echo(
            f"error: no rank of {folder} runs on this machine as this user; its record has the last lines", err=True
        )
        return CommandExit.NOT_FOUND
    return _print_pods([PodStacks("", "", ranks)], is_json=is_json)


def _print_pods(pods: Sequence[PodStacks], *, is_json: bool) -> CommandExit:
    """Print stacks, and exit 1 where some are missing."""
    for line in map(escaped_text, stack_lines(pods)) if not is_json else _json_lines(pods):
        typer.echo(line)
    is_complete = not any(pod.problem or any(rank.problem for rank in pod.ranks) for pod in pods)
    return CommandExit.ACCEPTED if is_complete else CommandExit.REFUSED


def stack_lines(pods: Iterable[PodStacks]) -> Iterator[str]:
    """Yield the stacks with their ranks and pods in front; pods and ranks without stacks come first."""
    groups: dict[tuple[str, ...], list[tuple[RankStacks, PodStacks]]] = {}
    for pod in pods:
        if not pod.ranks:
            yield f"[{pod.pod} {pod.node}] {pod.problem or 'no rank runs in it'}"
        for rank in pod.ranks:
            if rank.problem:
                yield f"[{_place_text([rank.rank], [pod])}] {rank.problem}"
            else:
                groups.setdefault(tuple(_frame_lines(rank)), []).append((rank, pod))
    for lines, members in sorted(groups.items(), key=lambda group: (len(group[1]), group[1][0][0].rank)):
        yield f"[{_place_text([rank.rank for rank, _ in members], [pod for _, pod in members])}]"
        yield from lines
        yield ""


def _frame_lines(stacks: RankStacks) -> Iterator[str]:
    return (_THREAD.sub("Thread", line) for line in stacks.lines if line)


def _place_text(ranks: Sequence[int], pods: Sequence[PodStacks]) -> str:
    nodes = sorted({pod.node for pod in pods} - {""})
    words = f" {nodes[0]}" if len(nodes) == 1 else f" on {len(nodes)} nodes" if nodes else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(ranks)}{words}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return numbers as ranges: 0-3, 5."""
    runs = groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    ranges = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)


def _json_lines(pods: Iterable[PodStacks]) -> Iterator[str]:
    for pod in pods:
        place: dict[str, Any] = {"pod": pod.pod, "node": pod.node}
        if not pod.ranks:
            yield json.dumps(place | {"problem": pod.problem})
        for rank in pod.ranks:
            yield json.dumps(place | stacks_document(rank))
