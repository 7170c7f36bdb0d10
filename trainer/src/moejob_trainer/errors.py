"""Foreseen failures of a run. Everything else is a bug and propagates."""

from __future__ import annotations


class BadConfiguration(Exception):
    """The job, its data or its volume cannot work: another try would end the same way (exit code 78)."""


class BadData(BadConfiguration):
    """Data, a tokenizer or a chat template that cannot be used for training; the message gives place, cause and fix."""


class TransientFailure(Exception):
    """Something outside failed that may work the next time."""


class Superseded(Exception):
    """A newer attempt owns the run folder: this process must stop and leave everything as it is."""
