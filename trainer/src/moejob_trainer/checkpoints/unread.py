"""Checkpoints that could not be read: the next start tries again, and only the one after it continues without them.

An input/output error passes with the cable or the node, or stays with the disk. It says nothing about the content of
the files, so such a checkpoint is never rejected. A start that cannot read the newest checkpoint notes it and ends. If
a later start cannot read it either, that start resumes from an older good one: the run must continue at some point.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from moejob_api.job.base import ApiModel
from moejob_trainer.checkpoints.names import UNREAD
from moejob_trainer.checkpoints.run import RunFolder
from moejob_trainer.checkpoints.verification import CheckpointSearch
from moejob_trainer.errors import TransientFailure
from moejob_trainer.runtime.disk import Disk, explain_failure, replace_file


class UnreadNote(ApiModel):
    """The checkpoints that a start could not read."""

    noted_by: str
    folders: tuple[str, ...]


def retry_unread(run_folder: RunFolder, search: CheckpointSearch, disk: Disk) -> None:
    """Note checkpoints that cannot be read and raise TransientFailure, unless an earlier start has noted them."""
    unread = [refusal for refusal in search.refusals if refusal.is_unread]
    note = _read_note(run_folder.checkpoints)
    if note is not None and search.checkpoint is not None and search.checkpoint.folder.name in note.folders:
        disk.remove(run_folder.checkpoints / UNREAD)
        note = None
    if not unread:
        return
    problem = f"{run_folder.checkpoints} has checkpoints that cannot be read now: {'; '.join(map(str, unread))}"
    if search.checkpoint is None:
        raise TransientFailure(
            f"{problem}; none is good beside them, so the next start tries again; look after the volume, or move the "
            "folder away to begin again"
        )
    names = {refusal.folder.name for refusal in unread}
    if note is not None and names <= {*note.folders} and note.noted_by != str(run_folder.token):
        return
    with explain_failure("noting a checkpoint that cannot be read", run_folder.checkpoints):
        run_folder.require_ours("judges checkpoints")
        folders = names.union(() if note is None else note.folders)
        content = UnreadNote(noted_by=str(run_folder.token), folders=tuple(sorted(folders))).model_dump_json(
            by_alias=True
        )
        replace_file(disk, run_folder.checkpoints / UNREAD, content.encode() + b"\n")
    raise TransientFailure(
        f"{problem}; the next start tries again, and resumes from step {search.checkpoint.folder.step} if it cannot "
        "either"
    )


def _read_note(checkpoints: Path) -> UnreadNote | None:
    try:
        return UnreadNote.model_validate_json((checkpoints / UNREAD).read_bytes())
    # Without a note that can be read, one more start tries.
    except (OSError, ValidationError):
        return None
