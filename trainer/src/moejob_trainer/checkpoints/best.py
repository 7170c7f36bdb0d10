"""The good checkpoint with the best evaluation. Reads only."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from moejob_trainer.checkpoints.coordination import Coordinator, SingleRank, on_first_rank
from moejob_trainer.checkpoints.manifest import Facts
from moejob_trainer.checkpoints.names import StepFolder
from moejob_trainer.checkpoints.policy import best
from moejob_trainer.checkpoints.verification import (
    FolderState,
    Found,
    Refusal,
    Search,
    VerificationDepth,
    checked,
    seen,
)
from moejob_trainer.errors import BadConfiguration

_FOLDERS = TypeAdapter(list[StepFolder])


def best_good(checkpoints: Path, measure: str, ranks: Coordinator | None = None) -> Search:
    """The good checkpoint with the best evaluation, and better ones that were refused. Every rank calls this."""
    coordinator, refused = ranks or SingleRank(), list[Refusal]()
    for folder in on_first_rank(coordinator, lambda: _judged(checkpoints, measure), _FOLDERS):
        outcome = checked(checkpoints / folder.name, VerificationDepth.HASHES, coordinator)
        if isinstance(outcome, Found):
            return Search(outcome, tuple(refused))
        refused.append(outcome)
    return Search(None, tuple(refused))


def facts_in(path: Path) -> Facts | Refusal | None:
    """The facts of a checkpoint whose files have their sizes; None of one that another version of moejob reads."""
    try:
        outcome = checked(path, VerificationDepth.SIZES)
    except BadConfiguration:
        return None
    return outcome.manifest.facts if isinstance(outcome, Found) else outcome


def _judged(checkpoints: Path, measure: str) -> list[StepFolder]:
    complete = [one.folder for one in seen(checkpoints) if one.state is FolderState.COMPLETE]
    read = [facts_in(checkpoints / folder.name) for folder in complete]
    known = [facts for facts in read if isinstance(facts, Facts)]
    return best(known, measure, len(known))
