"""The reference that an engine starts with."""

from __future__ import annotations

from trainer.parity.references import reference

__all__ = ["reference"]
