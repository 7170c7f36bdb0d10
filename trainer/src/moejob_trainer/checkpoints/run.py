"""The owner of a run folder, and the checkpoints of another run."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import ValidationError

from moejob_api.contract import pods
from moejob_trainer.checkpoints.commit import require_ours
from moejob_trainer.checkpoints.names import CHECKPOINTS, parse_step_folder
from moejob_trainer.checkpoints.verification import (
    GoodCheckpoint,
    Refusal,
    VerificationDepth,
    find_latest_checkpoint,
    verify_checkpoint,
)
from moejob_trainer.distributed.coordination import Coordinator
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.runtime.disk import TEMPORARY, Disk
from moejob_trainer.runtime.fencing import FenceToken
from moejob_trainer.runtime.megatron_process import is_megatron_checkpoint

RUN = pods.RunFile.OWNER.value
# The job that a run folder belongs to.
RunOwner = pods.RunOwner
_SCHEME = "pvc://"
# Errors of file systems without hard links, such as SMB shares and buckets.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run, and the start of the job on whose behalf this process uses it."""

    folder: Path
    run: RunOwner
    token: FenceToken
    is_ours: Callable[[], bool]

    @property
    def checkpoints(self) -> Path:
        """The folder of all step folders."""
        return self.folder / CHECKPOINTS

    def require_ours(self, action: str) -> None:
        """Raise Superseded unless the run is still this process's."""
        require_ours(self.is_ours, self.token, action)


def acquire_run_folder(folder: Path, run: RunOwner, disk: Disk | None = None) -> None:
    """Make this job the owner of the folder, or raise BadConfiguration when another job is. Idempotent."""
    volume = disk or Disk()
    volume.make_folder(folder)
    owner_file = folder / RUN
    if not owner_file.exists():
        _write_owner(volume, owner_file, run)
    owner = _read_run_owner(owner_file)
    if owner.uid != run.uid:
        raise BadConfiguration(
            f"{folder} belongs to job {owner.job} (uid {owner.uid}), not to job {run.job} (uid {run.uid}), and two "
            "runs in one folder would destroy each other's checkpoints; give this job another name (with "
            f"checkpoint.resumeFrom {folder.name} and resume Run it continues from there), or move the folder away"
        )


def _write_owner(volume: Disk, owner_file: Path, run: RunOwner) -> None:
    # Of two jobs that start at once, one fails to link; a rename would take the folder from the other.
    temporary = owner_file.with_name(f"{TEMPORARY}{RUN}-{uuid4().hex}")
    volume.write(temporary, run.model_dump_json(by_alias=True).encode() + b"\n")
    volume.sync(temporary)
    try:
        volume.link(temporary, owner_file)
        volume.sync(owner_file.parent)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        volume.rename(temporary, owner_file)
        volume.sync(owner_file.parent)
    finally:
        volume.remove(temporary)


def _read_run_owner(owner_file: Path) -> RunOwner:
    content = owner_file.read_bytes()
    try:
        return RunOwner.model_validate_json(content)
    except ValidationError as error:
        raise BadConfiguration(
            f"{owner_file} does not say whose run this is ({content[:60]!r}); put it right or move the folder away"
        ) from error


def resume_folder(resume_from: str, folder: Path, claims: Path = Path(pods.PodPath.CLAIMS)) -> Path:
    """Return the folder that checkpoint.resumeFrom names: a job's beside ours, or pvc://claim/path. Pure."""
    if resume_from.startswith(_SCHEME):
        source = claims / resume_from.removeprefix(_SCHEME)
    else:
        source = folder.parent / resume_from
    if source in (folder, folder / CHECKPOINTS):
        raise BadConfiguration(
            f"checkpoint.resumeFrom {resume_from} is this job itself, which resumes from its own checkpoints anyway; "
            "name another job or leave it out"
        )
    return source


def folder_of_run(source: Path) -> Path:
    """Return the run folder of a path that checkpoint.resumeFrom may name: a run, its checkpoints or one. Pure."""
    if parse_step_folder(source.name) is not None:
        return source.parent.parent
    return source.parent if source.name == CHECKPOINTS else source


def find_resume_checkpoint(resume_from: str, source: Path, ranks: Coordinator) -> GoodCheckpoint:
    """Find the good checkpoint in a run folder, its checkpoints folder, or a step folder. Every rank calls this."""
    if is_megatron_checkpoint(source):
        raise BadConfiguration(
            f"checkpoint.resumeFrom {resume_from} names a checkpoint of Megatron, whose optimizer, schedule and place "
            "in the data are not this trainer's; its weights alone can be taken: name it as spec.model.source"
        )
    if parse_step_folder(source.name) is not None:
        outcome = verify_checkpoint(source, VerificationDepth.HASHES, ranks)
        refusals: tuple[Refusal, ...] = (outcome,) if isinstance(outcome, Refusal) else ()
        checkpoint = outcome if isinstance(outcome, GoodCheckpoint) else None
    else:
        search = find_latest_checkpoint(
            source if source.name == CHECKPOINTS else source / CHECKPOINTS, VerificationDepth.HASHES, ranks
        )
        checkpoint, refusals = search.checkpoint, search.refusals
    if any(refusal.is_unread for refusal in refusals):
        raise TransientFailure(
            f"checkpoint.resumeFrom {resume_from} names {source}, where checkpoints cannot be read now: "
            f"{'; '.join(map(str, refusals))}; the next start tries again, or name the folder of another step"
        )
    if checkpoint is None:
        raise BadConfiguration(_no_checkpoint_message(resume_from, source, refusals))
    return checkpoint


def _no_checkpoint_message(resume_from: str, source: Path, refusals: tuple[Refusal, ...]) -> str:
    problem = f"checkpoint.resumeFrom {resume_from} names {source}, where there is no good checkpoint"
    fix = "name a job that has saved, a run folder or a step folder on a volume that this job mounts"
    if refusals:
        return f"{problem}: {'; '.join(map(str, refusals))}; {fix}"
    return f"{problem}: nothing was ever completed there; {fix}"
