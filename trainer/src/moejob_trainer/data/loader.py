"""The training data as an objective asks for it: global batches in order, prepared before they are needed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moejob_trainer.data.blending import Cursor
from moejob_trainer.data.prefetch import PrefetchIterator
from moejob_trainer.data.stream import BatchShare, TrainingBatch, TrainingData
from moejob_trainer.training import MicroBatch

_CURSOR = "cursor"


class BatchLoader:
    """This rank's share of every global batch, from a cursor on."""

    def __init__(self, training: TrainingData, share: BatchShare) -> None:
        self._training, self._share = training, share
        self._cursor = training.blend.start()
        self._ahead: PrefetchIterator[TrainingBatch] | None = None
        self.epoch: float | None = None
        self._waited_seconds = 0.0

    def next_batches(self) -> Sequence[MicroBatch]:
        """This data rank's micro batches of the next global batch, once the thread has them."""
        started_seconds = time.monotonic()
        batch = next(self._prefetched_batches())
        self._waited_seconds += time.monotonic() - started_seconds
        self._cursor, self.epoch = batch.cursor, batch.epoch
        return batch.micro_batches

    def waited_seconds(self) -> float:
        """Return the seconds that steps have waited for data since the last call."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def state_dict(self) -> Mapping[str, Any]:
        """Return the samples that steps have taken, without those that are prepared for later steps."""
        # The thread has read ahead; this is the cursor of the last batch that a step has taken.
        return {_CURSOR: self._cursor.as_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume behind the last batch that was trained on."""
        self.close()
        self._cursor = Cursor.from_json(state[_CURSOR])

    def close(self) -> None:
        """End the thread that prepares batches."""
        if self._ahead is not None:
            self._ahead.__exit__(None, None, None)
            self._ahead = None

    def _prefetched_batches(self) -> Iterator[TrainingBatch]:
        if self._ahead is None:
            self._ahead = PrefetchIterator(self._training.global_batches(self._share, self._cursor)).__enter__()
        return self._ahead
