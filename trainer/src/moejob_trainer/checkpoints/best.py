"""The good checkpoint with the best evaluation. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

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
from moejob_trainer.distributed.coordination import Coordinator, SingleRank, on_first_rank
from moejob_trainer.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class _Ranked:
    """The checkpoints with an evaluation, best first, and the refusals of checkpoints that could not be read."""

    folders: tuple[StepFolder, ...]
    unread: tuple[Refusal, ...]


_RANKED = TypeAdapter(_Ranked)


def best_good(checkpoints: Path, measure: str, ranks: Coordinator | None = None) -> Search:
    """Find the good checkpoint with the best evaluation; report better ones as refused. Every rank calls this."""
    coordinator = ranks or SingleRank()
    ranked = on_first_rank(coordinator, lambda: _ranked(checkpoints, measure), _RANKED)
    # A checkpoint that could not be read may have the best evaluation.
    refused = [*ranked.unread]
    for folder in ranked.folders:
        outcome = checked(checkpoints / folder.name, VerificationDepth.HASHES, coordinator)
        if isinstance(outcome, Found):
            return Search(outcome, tuple(refused))
        refused.append(outcome)
    return Search(None, tuple(refused))


def facts_in(path: Path) -> Facts | Refusal | None:
    """Return the facts of a checkpoint whose files have their sizes; None if only another version can read it."""
    try:
        outcome = checked(path, VerificationDepth.SIZES)
    except BadConfiguration:
        return None
    return outcome.manifest.facts if isinstance(outcome, Found) else outcome


def _ranked(checkpoints: Path, measure: str) -> _Ranked:
    complete = [one.folder for one in seen(checkpoints) if one.state is FolderState.COMPLETE]
    read = [facts_in(checkpoints / folder.name) for folder in complete]
    known = [facts for facts in read if isinstance(facts, Facts)]
    unread = tuple(facts for facts in read if isinstance(facts, Refusal) and facts.is_unread)
    return _Ranked(tuple(best(known, measure, len(known))), unread)
