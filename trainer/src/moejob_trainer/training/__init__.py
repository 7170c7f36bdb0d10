"""The training engine as the loop and the objectives see it: batches in, log-probabilities and updates out.

Imports nothing of Megatron; moejob_trainer.megatron implements `TrainingEngine`.
"""

from __future__ import annotations

from moejob_trainer.training.interface import Loss, LossTerms, Mean, TokenOutputs, TrainingEngine, UpdateResult
from moejob_trainer.training.micro_batch import Document, MicroBatch

__all__ = ["Document", "Loss", "LossTerms", "Mean", "MicroBatch", "TokenOutputs", "TrainingEngine", "UpdateResult"]
