"""The references that layouts are held against."""

from __future__ import annotations

from trainer.parity.references import further, lora_reference, reference

__all__ = ["further", "lora_reference", "reference"]
