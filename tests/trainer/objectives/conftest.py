"""The references that models are held against."""

from __future__ import annotations

from trainer.parity.references import lora_reference, reference

__all__ = ["lora_reference", "reference"]
