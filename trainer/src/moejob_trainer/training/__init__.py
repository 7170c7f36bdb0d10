"""The training engine as the loop and the objectives see it: batches in, log-probabilities and updates out.

Imports nothing of Megatron; moejob_trainer.megatron implements `TrainingEngine`.
"""

from __future__ import annotations

from moejob_trainer.training.interface import (
    ExpertCounts,
    LossFunction,
    LossTerms,
    TokenOutputs,
    TrainingEngine,
    UpdateResult,
    WeightedMean,
)
from moejob_trainer.training.micro_batch import Document, MicroBatch

__all__ = [
    "Document",
    "ExpertCounts",
    "LossFunction",
    "LossTerms",
    "MicroBatch",
    "TokenOutputs",
    "TrainingEngine",
    "UpdateResult",
    "WeightedMean",
]
