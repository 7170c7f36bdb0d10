"""Commit, rejection and deletion of a step folder. Never acts for a superseded process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from moejob_trainer.checkpoints.manifest import CheckpointManifest, build_marker
from moejob_trainer.checkpoints.names import MANIFEST, MARKER, REJECTED
from moejob_trainer.errors import Superseded, TransientFailure
from moejob_trainer.runtime.disk import Disk, remove_tree, replace_file
from moejob_trainer.runtime.fencing import FenceToken


def commit_checkpoint(
    folder: Path, manifest: CheckpointManifest, is_ours: Callable[[], bool], disk: Disk | None = None
) -> None:
    """Make the folder a checkpoint: manifest, then marker. Its files are durable: ranks sync before they hash."""
    volume = disk or Disk()
    require_ours(is_ours, manifest.facts.folder.token, f"commits {folder.name}")
    _require_files(folder, manifest)
    for path in _folders_to_sync(folder, manifest):
        volume.sync(path)
    content = manifest.to_json()
    replace_file(volume, folder / MANIFEST, content)
    # Check again, as late as possible: the process may have been suspended for hours at any line above.
    require_ours(is_ours, manifest.facts.folder.token, f"commits {folder.name}")
    replace_file(volume, folder / MARKER, build_marker(content).to_json())


def reject_checkpoint(folder: Path, disk: Disk | None = None) -> None:
    """Rename the marker of a damaged checkpoint, so that no start trusts it and retention does not count it."""
    volume = disk or Disk()
    volume.rename(folder / MARKER, folder / REJECTED)
    volume.sync(folder)


def delete_checkpoint(folder: Path, disk: Disk | None = None) -> None:
    """Remove a checkpoint, the marker first: a half-deleted folder must not pass as complete."""
    volume = disk or Disk()
    if (folder / MARKER).exists():
        volume.remove(folder / MARKER)
        volume.sync(folder)
    remove_tree(volume, folder)


def require_ours(is_ours: Callable[[], bool], token: FenceToken, action: str) -> None:
    """Raise Superseded when a newer attempt owns the run; `action` is what this process then leaves undone."""
    if not is_ours():
        raise Superseded(f"a newer attempt has taken over the run folder; this process ({token}) no longer {action}")


def _require_files(folder: Path, manifest: CheckpointManifest) -> None:
    """Compare sizes with the other hosts': rank 0 vouches only for files that it sees as their writers hashed them."""
    for entry in manifest.files:
        size = (folder / entry.name).stat().st_size
        if size != entry.size_bytes:
            raise TransientFailure(
                f"{folder / entry.name} has {size} bytes here and {entry.size_bytes} where it was written; "
                "the volume is not shared, or shows hosts different things; use storage that is consistent across nodes"
            )


def _folders_to_sync(folder: Path, manifest: CheckpointManifest) -> Iterable[Path]:
    """Return every folder with a file, inner folders first, and the parent, which holds the checkpoint's name."""
    inner = {parent for entry in manifest.files for parent in (folder / entry.name).parents}
    return sorted({path for path in inner if path.is_relative_to(folder)} | {folder.parent}, reverse=True)
