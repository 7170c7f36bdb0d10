"""The models of a job are read at every start of everything: pydantic gets types, not text."""

from __future__ import annotations

from moejob_api.job import Spec
from moejob_api.job.base import ApiModel


def test_the_type_of_no_field_is_text_that_pydantic_would_evaluate() -> None:
    models = [model for model in ApiModel.__subclasses__() if model.__module__.startswith("moejob_api.job.")]
    assert Spec in models
    kinds = {f"{model.__name__}.{name}": kind for model in models for name, kind in model.__annotations__.items()}
    assert not [field for field, kind in kinds.items() if isinstance(kind, str)]
