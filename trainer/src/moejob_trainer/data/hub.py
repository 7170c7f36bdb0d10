"""Commits of the Hugging Face hub that a run is bound to: a run resolves a name once, and later starts use that commit.

A branch or tag may move while a run lasts for weeks. Without a record a restart would read other weights, other data,
or run other code. So the commit is written into the run folder before any fetched file is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from pydantic import Field, ValidationError

from moejob_api.contract.pods import RunFile
from moejob_api.job.base import ApiModel
from moejob_api.job.status import MOST_HUB_COMMITS, HubCommit, RepositoryKind
from moejob_trainer.data.hub_bars import reporting_bars
from moejob_trainer.data.hub_files import (
    HubFile,
    HubFiles,
    durable_download,
    has_all_files,
    list_hub_files,
    verify_hub_files,
)
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.runtime.disk import Disk, replace_file
from moejob_trainer.runtime.heartbeats import ShareReport, ignore_share
from moejob_trainer.runtime.json_files import read_json

# Permanent errors of the hub: the repository does not exist, or this token has no access to it.
_REFUSALS = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})
# The files of a repository beside config, tokenizer and code.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data")
# Between a module's repository and its name, where the code of a model lies in another repository.
_ELSEWHERE = "--"


class PinnedRepository(ApiModel):
    """One name on the hub, and the commit that it stood for when the run first asked."""

    kind: Annotated[RepositoryKind, Field(description="model or dataset.")]
    name: Annotated[str, Field(min_length=1, description="Name on the hub.")]
    revision: Annotated[str | None, Field(description="What the job asks for. Absent: the default branch.")] = None
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$", description="What the run uses.")]
    files: Annotated[dict[str, HubFile], Field(description="The files of a model in this commit.")] = {}

    @property
    def request_key(self) -> tuple[RepositoryKind, str, str | None]:
        """The name, as a job asks for it."""
        return self.kind, self.name, self.revision


class _PinFile(ApiModel):
    repositories: tuple[PinnedRepository, ...] = ()


@dataclass(frozen=True, slots=True)
class HubPins:
    """The commits of a run, in its folder. One rank at a time writes."""

    run_folder: Path

    @property
    def file(self) -> Path:
        """The file that holds them."""
        return self.run_folder / RunFile.HUB

    def find_pin(self, kind: RepositoryKind, name: str, revision: str | None = None) -> PinnedRepository | None:
        """Return the commit that the run is bound to; None when it has not asked yet."""
        return next((pin for pin in self.read_pins() if pin.request_key == (kind, name, revision)), None)

    def record_pin(self, pin: PinnedRepository) -> None:
        """Bind the run to a commit, or say more of one."""
        self._write_pins((*(other for other in self.read_pins() if other.request_key != pin.request_key), pin))

    def inherit_pins(self, other_run_folder: Path) -> None:
        """Start with the commits of another run, if this run continues from its position in the data."""
        if not self.file.exists() and (theirs := HubPins(other_run_folder).read_pins()):
            self._write_pins(theirs)

    def list_commits(self) -> tuple[HubCommit, ...] | None:
        """Return the commits for the job's status; None when the run uses nothing of the hub."""
        commits = tuple(HubCommit(kind=pin.kind, name=pin.name, commit=pin.commit) for pin in self.read_pins())
        return commits[:MOST_HUB_COMMITS] or None

    def _write_pins(self, pins: tuple[PinnedRepository, ...]) -> None:
        pin_file = _PinFile(repositories=pins)
        content = pin_file.model_dump_json(by_alias=True, exclude_none=True, indent=2).encode() + b"\n"
        replace_file(Disk(), self.file, content)

    def read_pins(self) -> tuple[PinnedRepository, ...]:
        """Return all that the run is bound to."""
        if not self.file.exists():
            return ()
        try:
            return _PinFile.model_validate_json(self.file.read_bytes()).repositories
        except ValidationError as error:
            raise BadConfiguration(
                f"{self.file} does not say which commits the run uses ({error.error_count()} problems); put it right, "
                "or remove it to go on with what the hub holds now"
            ) from error


@dataclass(frozen=True, slots=True)
class _HubDownload:
    """A model to download: patterns of files that are left out, and the receiver of the share that is there."""

    name: str
    revision: str | None
    left_out: Sequence[str]
    report_share: ShareReport


def download_model(
    name: str,
    revision: str | None,
    pins: HubPins,
    left_out: Sequence[str] = (),
    report_share: ShareReport = ignore_share,
) -> Path:
    """Download a model beside the run folders of the volume, in the commit that the run is bound to, and compare it.

    left_out: patterns of files that are not downloaded.
    """
    pinned = pins.find_pin(RepositoryKind.MODEL, name, revision)
    folder = _fetch_snapshot(_HubDownload(name, revision, left_out, report_share), pinned, pins)
    files = verify_hub_files(folder, _expected_files(name, folder, pinned))
    # The folder of a snapshot has the name of its commit.
    repository = PinnedRepository(
        kind=RepositoryKind.MODEL, name=name, revision=revision, commit=folder.name, files=dict(files)
    )
    if repository != pinned:
        pins.record_pin(repository)
    return folder


def _fetch_snapshot(download: _HubDownload, pinned: PinnedRepository | None, pins: HubPins) -> Path:
    name, left_out = download.name, download.left_out
    cache = pins.run_folder.parent / "hub"
    if pinned is not None and (snapshot := _find_local_snapshot(pinned, cache, left_out)) is not None:
        return snapshot
    try:
        wanted_revision, ignored = pinned.commit if pinned else download.revision, [*left_out] or None
        bars = reporting_bars(download.report_share)
        with durable_download(cache / repo_folder_name(repo_id=name, repo_type="model"), pins.run_folder.name):
            folder = Path(
                snapshot_download(
                    name, revision=wanted_revision, cache_dir=cache, ignore_patterns=ignored, tqdm_class=bars
                )
            )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        pin_note = "" if pinned is None else f", in commit {pinned.commit}, which {pins.file} binds this run to,"
        kind = BadConfiguration if is_lasting(error, pinned) else TransientFailure
        raise kind(
            f"{name}{pin_note} cannot be had from the Hugging Face hub: {error}; name a folder, or pvc://claim/path"
        ) from error
    return folder


def is_lasting(error: Exception, pinned: PinnedRepository | None) -> bool:
    """Return whether another try would fail too. A hub that this run has reached before is only away for a while."""
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.status_code in _REFUSALS
    return pinned is None or isinstance(error, HFValidationError)


def _find_local_snapshot(pinned: PinnedRepository, cache: Path, left_out: Sequence[str]) -> Path | None:
    """Return a snapshot that needs no hub; None where files of it are missing."""
    try:
        snapshot = Path(snapshot_download(pinned.name, revision=pinned.commit, cache_dir=cache, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    needed_files = {
        path: file for path, file in pinned.files.items() if not any(fnmatch(path, pattern) for pattern in left_out)
    }
    return snapshot if has_all_files(snapshot, needed_files) else None


def _expected_files(name: str, folder: Path, pinned: PinnedRepository | None) -> HubFiles:
    return pinned.files if pinned is not None and pinned.files else list_hub_files(name, folder)


def pin_dataset_commit(name: str, pins: HubPins) -> str | None:
    """Return the commit of a data set that the run is bound to, from the first time on. None: the hub is not reached.

    The source is then a copy on this machine, of an unknown commit.
    """
    pinned = pins.find_pin(RepositoryKind.DATASET, name)
    if pinned is not None:
        return pinned.commit
    try:
        commit = HfApi().dataset_info(name).sha
    # Loading the data set reports the error.
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError):
        return None
    if commit is not None:
        pins.record_pin(PinnedRepository(kind=RepositoryKind.DATASET, name=name, commit=commit))
    return commit


def require_own_code(folder: Path) -> None:
    """Raise BadConfiguration when a model runs code of another repository, which no commit of its own fixes."""
    for path in sorted(folder.glob("*.json")):
        for module in _code_modules(path):
            if _ELSEWHERE in module:
                raise BadConfiguration(
                    f"{path.name} of the model takes its code from another repository, {module}, which may change "
                    "between two starts of a run; copy that code beside the model and name it without the repository"
                )


def _code_modules(path: Path) -> Iterator[str]:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return
    auto_map = content.get("auto_map") if isinstance(content, dict) else None
    for modules in auto_map.values() if isinstance(auto_map, dict) else ():
        yield from (
            module for module in (modules if isinstance(modules, list) else [modules]) if isinstance(module, str)
        )
