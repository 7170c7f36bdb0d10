"""The file side of checkpoints: step folders, manifest and marker, verification, fencing, retention.

A checkpoint is <run folder>/checkpoints/step-N.<attempt>.<restart>/ with the state's files, manifest.json (every file
with size and hash) and complete.json (the manifest's hash), written last. Nothing without both is trusted. Knows
nothing of what is in the state, and imports neither torch nor Megatron.
"""

from __future__ import annotations

from moejob_trainer.checkpoints.names import StepFolder
from moejob_trainer.checkpoints.run import RunFolder, RunOwner, own_run_folder
from moejob_trainer.checkpoints.store import CheckpointStore, Moment, Saved
from moejob_trainer.checkpoints.verification import Found, Refusal, Search, VerificationDepth, latest
from moejob_trainer.checkpoints.writer import Pending, StateWriter
from moejob_trainer.distributed.coordination import Coordinator, SingleRank
from moejob_trainer.runtime.fencing import FenceToken

__all__ = [
    "CheckpointStore",
    "Coordinator",
    "FenceToken",
    "Found",
    "Moment",
    "Pending",
    "Refusal",
    "RunFolder",
    "RunOwner",
    "Saved",
    "Search",
    "SingleRank",
    "StateWriter",
    "StepFolder",
    "VerificationDepth",
    "latest",
    "own_run_folder",
]
