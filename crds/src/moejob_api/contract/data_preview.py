"""The JSON by which the trainer tells `moejob data` about a job's data: neither may import the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from moejob_api.job.base import ApiModel, CountOrZero


@dataclass(frozen=True, slots=True)
class PreviewLimits:
    """Bounds on the records that are read and the examples that are shown of each data set."""

    records: int
    examples: int


class PreviewedText(ApiModel):
    """A run of tokens that are all trained on, or all not."""

    text: str
    trained: bool


class PreviewedExample(ApiModel):
    """A record as the model sees it."""

    place: str
    tokens: CountOrZero
    trained_tokens: CountOrZero
    parts: tuple[PreviewedText, ...]


class IncompleteRecord(ApiModel):
    """A record that the model does not see, or sees only in part."""

    place: str
    reason: str


class DatasetPreview(ApiModel):
    """One data set: counts of the records that were read, by what became of them, and examples."""

    part: Annotated[str, Field(description="train or eval, and its index.")]
    source: str
    split: str
    format: str
    records: CountOrZero
    # False where the data set has more records than the limit.
    is_whole: bool
    kept: CountOrZero
    truncated: CountOrZero
    dropped: CountOrZero
    tokens: CountOrZero
    trained_tokens: CountOrZero
    # Tokens of the shortest, the median and the longest sample; None without a sample.
    lengths: tuple[CountOrZero, CountOrZero, CountOrZero] | None
    left_out: tuple[IncompleteRecord, ...]
    examples: tuple[PreviewedExample, ...]


class DataPreview(ApiModel):
    """Every data set of a job, in its order."""

    datasets: tuple[DatasetPreview, ...]
