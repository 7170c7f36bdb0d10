"""The file side of checkpoints: step folders, manifest and marker, verification, fencing, retention.

A checkpoint is <run folder>/checkpoints/step-N.<attempt>.<restart>/ with the state's files, manifest.json (every file
with size and hash) and complete.json (the manifest's hash), written last. Nothing without both is trusted. Knows
nothing of what is in the state, and imports neither torch nor Megatron.
"""

from __future__ import annotations

from moejob_trainer.checkpoints.names import StepFolder
from moejob_trainer.checkpoints.ranks import Alone, Ranks
from moejob_trainer.checkpoints.run import Place, Run, take
from moejob_trainer.checkpoints.store import Checkpoints, Moment, Saved
from moejob_trainer.checkpoints.verification import Check, Found, Refusal, Search, latest
from moejob_trainer.checkpoints.writer import Pending, StateWriter
from moejob_trainer.fencing import Claim

__all__ = [
    "Alone",
    "Check",
    "Checkpoints",
    "Claim",
    "Found",
    "Moment",
    "Pending",
    "Place",
    "Ranks",
    "Refusal",
    "Run",
    "Saved",
    "Search",
    "StateWriter",
    "StepFolder",
    "latest",
    "take",
]
