"""The good checkpoint with the best evaluation. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from moejob_trainer.checkpoints.manifest import CheckpointFacts
from moejob_trainer.checkpoints.names import StepFolder
from moejob_trainer.checkpoints.policy import best_folders
from moejob_trainer.checkpoints.verification import (
    CheckpointSearch,
    FolderState,
    GoodCheckpoint,
    Refusal,
    VerificationDepth,
    list_step_folders,
    verify_checkpoint,
)
from moejob_trainer.distributed.coordination import Coordinator, SingleRank, run_on_first_rank
from moejob_trainer.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class _RankedCheckpoints:
    """The checkpoints with an evaluation, best first, and the refusals of checkpoints that could not be read."""

    folders: tuple[StepFolder, ...]
    unread: tuple[Refusal, ...]


_RANKED = TypeAdapter(_RankedCheckpoints)


def find_best_checkpoint(checkpoints: Path, measure: str, ranks: Coordinator | None = None) -> CheckpointSearch:
    """Find the good checkpoint with the best evaluation; report better ones as refused. Every rank calls this."""
    coordinator = ranks or SingleRank()
    ranked = run_on_first_rank(coordinator, lambda: _rank_checkpoints(checkpoints, measure), _RANKED)
    # A checkpoint that could not be read may have the best evaluation.
    refusals = [*ranked.unread]
    for folder in ranked.folders:
        outcome = verify_checkpoint(checkpoints / folder.name, VerificationDepth.HASHES, coordinator)
        if isinstance(outcome, GoodCheckpoint):
            return CheckpointSearch(outcome, tuple(refusals))
        refusals.append(outcome)
    return CheckpointSearch(None, tuple(refusals))


def read_facts(path: Path) -> CheckpointFacts | Refusal | None:
    """Return the facts of a checkpoint whose files have their sizes; None if only another version can read it."""
    try:
        outcome = verify_checkpoint(path, VerificationDepth.SIZES)
    except BadConfiguration:
        return None
    return outcome.manifest.facts if isinstance(outcome, GoodCheckpoint) else outcome


def _rank_checkpoints(checkpoints: Path, measure: str) -> _RankedCheckpoints:
    complete = [listed.folder for listed in list_step_folders(checkpoints) if listed.state is FolderState.COMPLETE]
    results = [read_facts(checkpoints / folder.name) for folder in complete]
    readable_facts = [facts for facts in results if isinstance(facts, CheckpointFacts)]
    unread = tuple(facts for facts in results if isinstance(facts, Refusal) and facts.is_unread)
    return _RankedCheckpoints(tuple(best_folders(readable_facts, measure, len(readable_facts))), unread)
