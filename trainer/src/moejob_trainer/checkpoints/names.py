"""Names of step folders, and their order. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moejob_api.contract.names import CHECKPOINT_MARKER, RunFile
from moejob_trainer.runtime.fencing import FenceToken

_NAME = re.compile(r"step-(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")

CHECKPOINTS = RunFile.CHECKPOINTS.value
MANIFEST = "manifest.json"
MARKER = CHECKPOINT_MARKER
# The marker's name once verification has found damage.
REJECTED = "rejected.json"

# Beside the step folders: the checkpoints that a start could not read.
UNREAD = "unread.json"

OWN_FILES = frozenset({MANIFEST, MARKER, REJECTED})


@dataclass(frozen=True, slots=True, order=True)
class StepFolder:
    """One checkpoint's folder. A later step is newer; of one step that two starts saved, the later start's is."""

    step: int
    token: FenceToken

    @property
    def name(self) -> str:
        """The folder's name: step-N.<attempt>.<restart>."""
        return f"step-{self.step}.{self.token.attempt}.{self.token.restart}"


def parse_step_folder(name: str) -> StepFolder | None:
    """Parse the name of a folder; None when no checkpoint has such a name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, attempt, restart = map(int, match.groups())
    return StepFolder(step, FenceToken(attempt, restart))
