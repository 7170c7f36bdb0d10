"""The file side of checkpoints: step folders, manifest and marker, verification, fencing, retention.

A checkpoint is <run folder>/checkpoints/step-N.<attempt>.<restart>/ with the state's files, manifest.json (every file
with size and hash) and complete.json (the manifest's hash), written last. Nothing without both is trusted. Knows
nothing of what is in the state, and imports neither torch nor Megatron.

A save begins after one step and is committed after a later one, eight calls from the loop to the marker:

    run_training_loop                        loop.py: after each step
      RunCheckpoints.save                    saving.py: where is_due, it takes a snapshot and states a SaveRequest
        CheckpointStore.save                 store.py: rank 0 makes room and the step folder
          RunWriter.start_writing            saving.py: every rank starts to write its tensors, rank 0 the counters
      RunCheckpoints.poll                    saving.py: after each further step
        CheckpointStore.poll                 store.py: has every rank written its files, then hashed them?
          CheckpointStore._commit_save       store.py: rank 0 gathers the hashes of all
            run_on_first_rank                distributed/coordination.py: every rank learns how rank 0 ends
              capture_outcome                distributed/coordination.py: a failure of rank 0 is raised on all
                commit_all                   store.py: the step log is synced, the manifest put together
                  commit_checkpoint          commit.py: manifest.json, fence, then the marker complete.json
"""

from __future__ import annotations

from moejob_trainer.checkpoints.names import StepFolder
from moejob_trainer.checkpoints.run import RunFolder, RunOwner, acquire_run_folder
from moejob_trainer.checkpoints.store import CheckpointStore, SavedCheckpoint, SaveRequest
from moejob_trainer.checkpoints.verification import (
    CheckpointSearch,
    GoodCheckpoint,
    Refusal,
    VerificationDepth,
    find_latest_checkpoint,
)
from moejob_trainer.checkpoints.writer import PendingWrite, StateWriter
from moejob_trainer.distributed.coordination import Coordinator, SingleRank
from moejob_trainer.runtime.fencing import FenceToken

__all__ = [
    "CheckpointSearch",
    "CheckpointStore",
    "Coordinator",
    "FenceToken",
    "GoodCheckpoint",
    "PendingWrite",
    "Refusal",
    "RunFolder",
    "RunOwner",
    "SaveRequest",
    "SavedCheckpoint",
    "SingleRank",
    "StateWriter",
    "StepFolder",
    "VerificationDepth",
    "acquire_run_folder",
    "find_latest_checkpoint",
]
