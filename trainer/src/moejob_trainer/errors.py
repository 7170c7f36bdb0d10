"""What a run says when the fault is its user's: the rank ends with exit code 78, for a retry would fail alike."""

from __future__ import annotations


class BadData(ValueError):
    """Data, a tokenizer or a chat template that cannot be trained with; the message says where, what and the fix."""
