"""The lines of `moejob logs`: rank and node in front, or one JSON object a line."""

from __future__ import annotations

import json
import re
from contextlib import aclosing
from datetime import timedelta

import typer

from moejob_api.contract.texts import escaped_lines, escaped_text
from moejob_cli.exits import CommandExit
from moejob_cli.notices import print_notice
from moejob_client.jobs import AsyncClient
from moejob_client.log_lines import LogLine
from moejob_client.log_selection import LogSelection

_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_age(text: str) -> timedelta | None:
    """Read an age such as 90s, 10m, 2h or 1d; None when it is none."""
    match = _AGE.fullmatch(text)
    return None if match is None else timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


async def print_logs(
    jobs: AsyncClient, name: str, selection: LogSelection, *, is_followed: bool, is_json: bool
) -> CommandExit:
    """Print the lines of a job's pods."""
    lines = jobs.logs(name, selection, is_followed=is_followed, report=print_notice)
    async with aclosing(lines):
        async for line in lines:
            typer.echo(_line_document(line) if is_json else _line_text(line))
    return CommandExit.ACCEPTED


def _line_text(line: LogLine) -> str:
    speaker = f"rank {line.rank}" if line.rank is not None else line.pod
    return escaped_text(f"[{speaker} {line.node}] ") + escaped_lines(line.text)


def _line_document(line: LogLine) -> str:
    document = {"time": line.time.isoformat(), "pod": line.pod, "node": line.node, "rank": line.rank, "text": line.text}
    return json.dumps(document)
