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
from moejob_trainer.checkpoints.names import CHECKPOINTS, step_folder
from moejob_trainer.checkpoints.verification import Found, Refusal, VerificationDepth, checked, latest
from moejob_trainer.distributed.coordination import Coordinator
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.runtime.disk import TEMPORARY, Disk
from moejob_trainer.runtime.fencing import FenceToken

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

    def require_ours(self, does: str) -> None:
        """Raise Superseded unless the run is still this process's."""
        require_ours(self.is_ours, self.token, does)


def own_run_folder(folder: Path, run: RunOwner, disk: Disk | None = None) -> None:
    """Make this job the owner of the folder, or raise BadConfiguration when another job is. Idempotent."""
    volume = disk or Disk()
    volume.make_folder(folder)
    written = folder / RUN
    if not written.exists():
        _write_owner(volume, written, run)
    owner = _owner(written)
    if owner.uid != run.uid:
        raise BadConfiguration(
            f"{folder} belongs to job {owner.job} (uid {owner.uid}), not to job {run.job} (uid {run.uid}), and two "
            "runs in one folder would destroy each other's checkpoints; give this job another name (with "
            f"checkpoint.resumeFrom {folder.name} and resume Run it continues from there), or move the folder away"
        )


def _write_owner(volume: Disk, written: Path, run: RunOwner) -> None:
    # Of two jobs that start at once, one fails to link; a rename would take the folder from the other.
    temporary = written.with_name(f"{TEMPORARY}{RUN}-{uuid4().hex}")
    volume.write(temporary, run.model_dump_json(by_alias=True).encode() + b"\n")
    volume.sync(temporary)
    try:
        volume.link(temporary, written)
        volume.sync(written.parent)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        volume.rename(temporary, written)
        volume.sync(written.parent)
    finally:
        volume.remove(temporary)


def _owner(written: Path) -> RunOwner:
    content = written.read_bytes()
    try:
        return RunOwner.model_validate_json(content)
    except ValidationError as error:
        raise BadConfiguration(
            f"{written} does not say whose run this is ({content[:60]!r}); put it right or move the folder away"
        ) from error


def other_run(resume_from: str, folder: Path, claims: Path = Path(pods.Path.CLAIMS)) -> Path:
    """Return the folder that checkpoint.resumeFrom names: a job's beside ours, or pvc://claim/path. Pure."""
    if resume_from.startswith(_SCHEME):
        named = claims / resume_from.removeprefix(_SCHEME)
    else:
        named = folder.parent / resume_from
    if named in (folder, folder / CHECKPOINTS):
        raise BadConfiguration(
            f"checkpoint.resumeFrom {resume_from} is this job itself, which resumes from its own checkpoints anyway; "
            "name another job or leave it out"
        )
    return named


def folder_of_run(named: Path) -> Path:
    """Return the run folder of a path that checkpoint.resumeFrom may name: a run, its checkpoints or one. Pure."""
    if step_folder(named.name) is not None:
        return named.parent.parent
    return named.parent if named.name == CHECKPOINTS else named


def resumed(resume_from: str, named: Path, ranks: Coordinator) -> Found:
    """Find the good checkpoint in a run folder, its checkpoints folder, or a step folder. Every rank calls this."""
    if step_folder(named.name) is not None:
        outcome = checked(named, VerificationDepth.HASHES, ranks)
        refused: tuple[Refusal, ...] = (outcome,) if isinstance(outcome, Refusal) else ()
        found = outcome if isinstance(outcome, Found) else None
    else:
        search = latest(named if named.name == CHECKPOINTS else named / CHECKPOINTS, VerificationDepth.HASHES, ranks)
        found, refused = search.found, search.refused
    if any(refusal.is_unread for refusal in refused):
        raise TransientFailure(
            f"checkpoint.resumeFrom {resume_from} names {named}, where checkpoints cannot be read now: "
            f"{'; '.join(map(str, refused))}; the next start tries again, or name the folder of another step"
        )
    if found is None:
        raise BadConfiguration(_nothing_good(resume_from, named, refused))
    return found


def _nothing_good(resume_from: str, named: Path, refused: tuple[Refusal, ...]) -> str:
    problem = f"checkpoint.resumeFrom {resume_from} names {named}, where there is no good checkpoint"
    fix = "name a job that has saved, a run folder or a step folder on a volume that this job mounts"
    if refused:
        return f"{problem}: {'; '.join(map(str, refused))}; {fix}"
    return f"{problem}: nothing was ever completed there; {fix}"
