"""Checks before the first step, and before an export is renamed to its final path: a model that differs is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moejob_api.layout.sizes import Layout
from moejob_trainer.conversion.checkpoint import unusable
from moejob_trainer.conversion.quantized import readable
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron.training_engine import MegatronEngine
from moejob_trainer.model_check.comparison import differences
from moejob_trainer.model_check.reference import AdaptedWeights, Reference


@dataclass(frozen=True, slots=True)
class Checks:
    """Of the model that an engine holds now. All ranks call each together, and all raise or none."""

    engine: MegatronEngine
    layout: Layout
    node: int

    def imported(self, folder: Path) -> None:
        """Refuse imported weights that compute something other than Transformers makes of the files."""
        if found := differences(self.engine, self.layout, self.node, lambda: self._reference(folder)):
            raise unusable(f"{folder} {found}; do not train it: use another model, or report its config.json")

    def exported(self, folder: Path) -> None:
        """Refuse exported files that compute something other than this model."""
        self._refuse_export(folder, lambda: self._reference(folder))

    def exported_adapters(self, folder: Path, base: Path, scale: float) -> None:
        """Refuse exported adapters that with the published model compute something other than this model."""

        def reference() -> Reference:
            return Reference(AdaptedWeights.read_from(readable(base), folder, scale), base, self._dtype)

        self._refuse_export(folder, reference)

    def _refuse_export(self, folder: Path, reference: Callable[[], Reference]) -> None:
        if found := differences(self.engine, self.layout, self.node, reference):
            raise BadConfiguration(f"{folder} {found}; do not use it: what was trained is in the last checkpoint")

    def _reference(self, folder: Path) -> Reference:
        return Reference(readable(folder), folder, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """The type that weights are computed in, and written as."""
        found: torch.dtype = getattr(torch, self.engine.spec.model.dtype.value)
        return found
