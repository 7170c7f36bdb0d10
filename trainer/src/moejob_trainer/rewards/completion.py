"""One answer as rewards see it, and the failure of a reward. Imported by workers: knows nothing of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class RewardFailed(RuntimeError):
    """A reward raised, took too long, or gave no number."""


class Unreachable(RewardFailed):
    """A whole service did not answer: no completion is to blame."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer to a prompt."""

    prompt: str
    text: str
    # Of the answer, its end included.
    tokens: int
    max_new_tokens: int
    # The other fields of the prompt's record, as JSON knows them.
    fields: Mapping[str, object] = field(default_factory=dict)
