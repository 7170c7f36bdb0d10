"""Checks before the first step, and before an export is renamed to its final path: a model that differs is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from moejob_api.layout.sizes import Layout
from moejob_trainer.conversion.checkpoint import unusable_checkpoint
from moejob_trainer.conversion.text_part import open_tensor_source
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.model_check.comparison import compare_models
from moejob_trainer.model_check.reference import AdaptedWeights, ReferenceModel
from moejob_trainer.runtime.heartbeats import ShareReport, ignore_share


@dataclass(frozen=True, slots=True)
class ModelChecks:
    """Of the model that an engine holds now. All ranks call each together, and all raise or none."""

    engine: MegatronTrainingEngine
    layout: Layout
    node: int
    # Of a check before the first step; that of an export is part of a longer work.
    report_share: ShareReport = ignore_share

    def check_import(self, folder: Path) -> None:
        """Refuse imported weights that compute something other than Transformers makes of the files."""
        # A function and no model: only the ranks that compare read the files.
        make_reference = partial(self._make_reference, folder, self.report_share)
        if report := compare_models(self.engine, self.layout, self.node, make_reference):
            raise unusable_checkpoint(
                f"{folder} {report}; do not train it: use another model, or report its config.json"
            )

    def check_export(self, folder: Path) -> None:
        """Refuse exported files that compute something other than this model."""
        self._refuse_export(folder, lambda: self._make_reference(folder))

    def check_exported_adapters(self, folder: Path, base: Path, scale: float) -> None:
        """Refuse exported adapters that with the published model compute something other than this model."""

        def make_reference() -> ReferenceModel:
            return ReferenceModel(
                AdaptedWeights.read_from(open_tensor_source(base), folder, scale), base, self._compute_dtype
            )

        self._refuse_export(folder, make_reference)

    def _refuse_export(self, folder: Path, make_reference: Callable[[], ReferenceModel]) -> None:
        if report := compare_models(self.engine, self.layout, self.node, make_reference):
            raise BadConfiguration(f"{folder} {report}; do not use it: what was trained is in the last checkpoint")

    def _make_reference(self, folder: Path, report_share: ShareReport = ignore_share) -> ReferenceModel:
        return ReferenceModel(open_tensor_source(folder), folder, self._compute_dtype, report_share)

    @property
    def _compute_dtype(self) -> torch.dtype:
        """The type that weights are computed in, and written as."""
        dtype: torch.dtype = getattr(torch, self.engine.spec.model.dtype.value)
        return dtype
