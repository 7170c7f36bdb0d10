"""The engine as the loop and the objectives see it: batches in, log-probabilities and updates out.

Imports nothing of Megatron; moejob_trainer.megatron implements `Engine`.
"""

from __future__ import annotations

from moejob_trainer.training.interface import Engine, Loss, LossTerms, Mean, TokenOutputs, UpdateResult
from moejob_trainer.training.micro_batch import Document, MicroBatch

__all__ = ["Document", "Engine", "Loss", "LossTerms", "Mean", "MicroBatch", "TokenOutputs", "UpdateResult"]
