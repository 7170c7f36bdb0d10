"""Files of a model in a cache of the hub, compared with the hub's digests.

The cache is on a volume that other jobs write to. The hub identifies a large file by the SHA-256 of its content and a
small one by its git blob. The commit of a run never changes, so the hub's digests are recorded once.
Hashing weights takes as long as reading them: they are hashed again only if the volume reports that they were written.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import httpx
from huggingface_hub import HfApi, RepoFile
from huggingface_hub.errors import HfHubHTTPError
from pydantic import Field

from moejob_api.job.base import ApiModel
from moejob_trainer.data.file_contents import file_stamp
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.runtime.disk import Disk, replace_file, sync_tree

# Config, tokenizer and code are smaller, and are hashed at each start.
_SMALL_BYTES = 1 << 26
_SHA256_DIGITS = 64
# Behind it the run that downloads. The hub's library gives a file its name before the content is safe on the disk.
_MARK = ".moejob-downloading-"
_CONTENT_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubFile(ApiModel):
    """A file of a commit."""

    digest: Annotated[
        str,
        Field(
            pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$", description="SHA-256; with 40 digits what git calls its content."
        ),
    ]
    seen: Annotated[
        str, Field(max_length=120, description="Inode, size and times of the file when its content had this digest.")
    ] = ""


HubFiles = Mapping[str, HubFile]


@contextmanager
def durable_download(repository: Path, run: str) -> Iterator[None]:
    """Sync what is downloaded into a repository of the cache meanwhile, before a run is bound to it.

    A loss of power before the sync leaves files that are empty or cut, under their names: the hub's library would take
    them for whole. The mark of a download that never ended says so, and the next download fetches them again. A mark of
    another run may be of a download under way, whose files are whole: it stays.
    """
    mark = repository / f"{_MARK}{run}"
    if any(repository.glob(f"{_MARK}*")):
        _remove_cut_files(repository / "blobs")
    for folder in (repository.parent, repository):
        Disk().make_folder(folder)
    replace_file(Disk(), mark, b"")
    yield
    sync_tree(Disk(), repository)
    Disk().remove(mark)


def _remove_cut_files(blobs: Path) -> None:
    for blob in sorted(blobs.glob("*")):
        is_named = _CONTENT_NAME.fullmatch(blob.name) is not None
        if is_named and _compute_digest(blob, HubFile(digest=blob.name)) != blob.name:
            Disk().remove(blob)


def list_hub_files(name: str, folder: Path) -> HubFiles:
    """List the files of a snapshot's commit with the hub's digests; without the hub, with the cache's file names."""
    try:
        tree = list(HfApi().list_repo_tree(name, revision=folder.name, recursive=True))
    except (HfHubHTTPError, httpx.HTTPError, OSError):
        return dict(_list_cached_files(folder))
    files = (entry for entry in tree if isinstance(entry, RepoFile))
    return {file.path: HubFile(digest=file.blob_id if file.lfs is None else file.lfs.sha256) for file in files}


def _list_cached_files(folder: Path) -> Iterator[tuple[str, HubFile]]:
    for path in _list_files(folder):
        try:
            yield str(path.relative_to(folder)), HubFile(digest=path.resolve().name)
        except ValueError as error:
            raise _altered_file_error(
                path, f"leads to {path.resolve()}, which is not called after its content"
            ) from error


def has_all_files(folder: Path, files: HubFiles) -> bool:
    """Return whether no file of the commit is missing."""
    return all((folder / path).exists() for path in files)


def verify_hub_files(folder: Path, files: HubFiles) -> HubFiles:
    """Return the files as they are seen now; BadConfiguration when one is not the commit's or has other content."""
    present = {str(path.relative_to(folder)): path for path in _list_files(folder)}
    for path in present.keys() - files.keys():
        raise _altered_file_error(present[path], "is no file of this commit")
    with ThreadPoolExecutor(Disk.reads_at_once) as threads:
        verified = threads.map(lambda name: _verify_file(present[name], files[name]), present)
        return {**files, **dict(zip(present, verified, strict=True))}


def _verify_file(path: Path, file: HubFile) -> HubFile:
    # Take the stamp before reading: a write in the meantime changes it.
    stamp = file_stamp(path)
    if stamp == file.seen and path.stat().st_size >= _SMALL_BYTES:
        return file
    digest = _compute_digest(path, file)
    if digest != file.digest:
        raise _altered_file_error(path, f"has the digest {digest} and not {file.digest}, which the hub says")
    return file.model_copy(update={"seen": stamp})


def _compute_digest(path: Path, file: HubFile) -> str:
    with path.open("rb") as content:
        if len(file.digest) == _SHA256_DIGITS:
            return hashlib.file_digest(content, "sha256").hexdigest()
        # The hash of a git blob. The commit is a SHA-1 too, so this check is as strong as the commit itself.
        blob_hash = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        return hashlib.file_digest(content, lambda: blob_hash).hexdigest()


def _list_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if not path.is_dir())


def _altered_file_error(path: Path, problem: str) -> BadConfiguration:
    cache = next((parent for parent in path.parents if parent.name.startswith("models--")), path.parent)
    return BadConfiguration(
        f"{path} {problem}: the disk, or another job of the volume, has changed it; delete {cache}, and the next start "
        "downloads the model again"
    )
