"""The files of a run as Python values: steps, samples, events of the record, and whole files for this machine."""

from __future__ import annotations

import re
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import orjson

from moejob_api.contract.names import RunFile
from moejob_client.failures import JobRequestError, RequestFailure
from moejob_client.log_lines import LogLine

if TYPE_CHECKING:
    from moejob_client.job_volume import JobVolume

_SAMPLE_FILE = re.compile(r"samples/(?P<kind>eval-)?step-(?P<step>[0-9]{1,12})\.jsonl")
_WRITERS = "grpo.loggedAnswers writes those of steps, evaluations with prompts theirs, which --eval prints"
_BILLION = 1_000_000_000
# Of a line of the step log; mostly it has 600.
_LONGEST_STEP_BYTES = 4096


async def read_steps(volume: JobVolume) -> AsyncGenerator[dict[str, Any]]:
    """Yield the lines of the step log. A step that was done again has several: the last one counts."""
    incomplete = b""
    async with aclosing(volume.read_file(RunFile.STEPS)) as chunks:
        async for chunk in chunks:
            *lines, incomplete = (incomplete + chunk).split(b"\n")
            for line in lines:
                if (step := parse_object(line)) is not None:
                    yield step


async def read_samples(volume: JobVolume, step: int | None, *, is_evaluation: bool) -> AsyncGenerator[dict[str, Any]]:
    """Yield the answers of a step, or of the newest step that has any."""
    chosen, path = choose_samples(await volume.list_files(["samples/*.jsonl"]), step, is_evaluation=is_evaluation)
    async with _open_archive(volume, [path]) as archive:
        for _, content in _archived_files(archive):
            for line in content:
                if (sample := parse_object(line)) is not None:
                    yield {"step": chosen, **sample}


def choose_samples(names: Iterable[str], step: int | None, *, is_evaluation: bool) -> tuple[int, str]:
    """Return step and path of the answers of a step, or of the newest step that has any."""
    matches = [_SAMPLE_FILE.fullmatch(name) for name in names]
    steps = {int(match["step"]): match[0] for match in matches if match and bool(match["kind"]) == is_evaluation}
    chosen = max(steps, default=None) if step is None else step
    if chosen is None or chosen not in steps:
        others = f"there are those of {', '.join(map(str, sorted(steps)))}" if steps else _WRITERS
        place = "any step" if chosen is None else f"step {chosen}"
        raise JobRequestError(RequestFailure.NO_FILE, f"there are no answers of {place}; {others}")
    return chosen, steps[chosen]


async def read_record_lines(volume: JobVolume, attempt: int | None) -> AsyncGenerator[LogLine]:
    """Yield what the record keeps of an attempt, or of the newest: the last lines of ranks, and words of launchers."""
    from moejob_api.contract import record  # noqa: PLC0415 its models take as long to build as a command may

    folder = "attempt-*" if attempt is None else record.attempt_folder_name(attempt)
    names = await volume.list_files([f"{RunFile.RECORD}/{folder}/pod-*.jsonl"])
    newest = max((name.split("/")[1] for name in names), default=None)
    if newest is None:
        return
    lines: list[LogLine] = []
    async with _open_archive(volume, [f"{RunFile.RECORD}/{newest}/pod-*.jsonl"]) as archive:
        for name, content in _archived_files(archive):
            node, pod = "", PurePosixPath(name).stem
            for event in record.read_record_lines(content):
                node = event.node or node
                time = int(event.time * _BILLION)
                words = event.lines or tuple(filter(None, [f"{event.kind}: {event.message}" if event.message else ""]))
                lines += [LogLine(time, pod, node, text, event.rank if event.lines else None) for text in words]
    for line in sorted(lines, key=lambda line: line.nanoseconds):
        yield line


async def copy_files(volume: JobVolume, path: str, target: Path) -> int:
    """Copy a file or a folder of the run folder into a new folder, and return how many files it has."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise JobRequestError(RequestFailure.REFUSED, f"{path} is no path inside the run folder")
    async with _open_archive(volume, [path, f"{path.rstrip('/')}/**"]) as archive:
        members = archive.getmembers()
        if not members:
            raise JobRequestError(RequestFailure.NO_FILE, f"there is no {path} in the run folder")
        for member in members:
            member.name = _copied_name(PurePosixPath(member.name), parts)
        _extract_new(archive, target)
        return len(members)


async def extract_files(volume: JobVolume, patterns: Sequence[str], folder: Path) -> None:
    """Write the files that match patterns into a folder, under their names in the run folder."""
    async with _open_archive(volume, patterns) as archive:
        try:
            archive.extractall(folder, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise JobRequestError(RequestFailure.REFUSED, f"{folder} cannot be written: {error}") from error


async def read_last_steps(volume: JobVolume, count: int) -> list[dict[str, Any]]:
    """Return the last lines of the step log, the newest last."""
    content = b""
    async with aclosing(volume.read_file(RunFile.STEPS, -count * _LONGEST_STEP_BYTES)) as chunks:
        async for chunk in chunks:
            content += chunk
    # The first line may be cut, and the last one is not finished yet.
    steps = filter(None, map(parse_object, content.split(b"\n")[:-1]))
    return list(steps)[-count:]


def _copied_name(name: PurePosixPath, path: PurePosixPath) -> str:
    """Return where a file goes below the target: what the path names becomes the target, or a file in it."""
    is_inside = name != path and name.is_relative_to(path)
    return str(name.relative_to(path)) if is_inside else name.name


def _extract_new(archive: tarfile.TarFile, target: Path) -> None:
    try:
        target.mkdir(parents=True)
        # The filter refuses names that lead out of the folder, and all but files and folders.
        archive.extractall(target, filter="data")
    except FileExistsError:
        raise JobRequestError(RequestFailure.REFUSED, f"{target} exists already; name a new folder") from None
    except (OSError, tarfile.TarError) as error:
        raise JobRequestError(RequestFailure.REFUSED, f"{target} cannot be written: {error}") from error


@asynccontextmanager
async def _open_archive(volume: JobVolume, patterns: Sequence[str]) -> AsyncIterator[tarfile.TarFile]:
    """Give the files that match as an archive, which lies on this machine's disk meanwhile."""
    with TemporaryFile() as file:
        async with aclosing(volume.pack_files(patterns)) as chunks:
            async for chunk in chunks:
                file.write(chunk)
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            yield archive


def _archived_files(archive: tarfile.TarFile) -> list[tuple[str, IO[bytes]]]:
    opened = ((member.name, archive.extractfile(member)) for member in archive.getmembers())
    return [(name, content) for name, content in opened if content is not None]


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, None for a damaged one."""
    try:
        value = orjson.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
