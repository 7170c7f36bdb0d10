"""One reference for each family, of which a test's folder takes what it needs into its conftest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moejob_api.models.shape import Family
from trainer.parity.balancing import Expected, Rules
from trainer.parity.cells import StepMeasurements, write_reference
from trainer.parity.lora import write_lora_reference
from trainer.parity.multi_token_prediction import write_further_reference

Reference = Callable[..., tuple[Path, StepMeasurements]]
Further = Callable[..., tuple[Path, Expected]]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The folder of a family's reference, and what it measured; written when first asked for."""

    @cache
    def written(family: Family, **changes: Any) -> tuple[Path, StepMeasurements]:
        folder = tmp_path_factory.mktemp(family)
        return folder, write_reference(family, folder, **changes)

    return written


@pytest.fixture(scope="session")
def lora_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The folder of a family's adapters trained by hand, and what was measured."""

    @cache
    def written(family: Family) -> tuple[Path, StepMeasurements]:
        folder = tmp_path_factory.mktemp("lora")
        return folder, write_lora_reference(family, folder)

    return written


@pytest.fixture(scope="session")
def further(tmp_path_factory: pytest.TempPathFactory) -> Further:
    """The same of a model with modules that predict further tokens."""

    @cache
    def written(family: Family, rules: Rules | None = None, *, tied: bool = False) -> tuple[Path, Expected]:
        folder = tmp_path_factory.mktemp(f"further-{family}")
        return folder, write_further_reference(family, folder, rules, tie_word_embeddings=tied)

    return written
