"""Checkpoints of Megatron: what could not be read or written is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest

from builders import spec
from model_configs import config
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_api.models.trainable import CONVERTED_FAMILIES, UNCONVERTED_FAMILIES
from moejob_api.rules.megatron_checkpoint_rules import megatron_checkpoint_problems

EXPORT: dict[str, Any] = {"checkpoint": {"exportMegatron": True}}
SOURCE: dict[str, Any] = {"model": {"source": "pvc://claim/megatron", "config": "Qwen/Qwen3-30B-A3B"}}
MTP: dict[str, Any] = {"num_nextn_predict_layers": 1}


def refused(sections: dict[str, Any], family: Family | None, **changes: Any) -> list[str]:
    """The fields that are refused."""
    shape = None if family is None else shape_of(config(family, **changes))
    return [problem.path.removeprefix("spec.") for problem in megatron_checkpoint_problems(spec(**sections), shape)]


@pytest.mark.parametrize(
    ("sections", "family", "changes", "expected"),
    [
        pytest.param({}, Family.QWEN3_NEXT, {}, [], id="neither read nor written"),
        pytest.param(SOURCE, Family.QWEN3_MOE, {}, [], id="read"),
        pytest.param(SOURCE, None, {}, [], id="read, of an unseen model"),
        pytest.param(EXPORT, Family.QWEN3_MOE, {}, [], id="written"),
        pytest.param(EXPORT, None, {}, [], id="written, of an unseen model"),
        pytest.param(SOURCE, Family.QWEN3_NEXT, {}, ["model.config"], id="read, of an unknown family"),
        pytest.param(EXPORT, Family.QWEN3_NEXT, {}, ["checkpoint.exportMegatron"], id="written, of an unknown family"),
        pytest.param(
            {"model": {"source": "Qwen/Qwen3-8B", "config": "Qwen/Qwen3-8B"}},
            None,
            {},
            ["model.config"],
            id="no folder",
        ),
        pytest.param(
            {"checkpoint": {"exportMegatron": True, "exportHuggingFace": False}},
            Family.QWEN3_MOE,
            {},
            ["checkpoint.exportMegatron"],
            id="without the export that it is made of",
        ),
        pytest.param(
            EXPORT | {"training": {"lora": {}}}, Family.QWEN3_MOE, {}, ["checkpoint.exportMegatron"], id="adapters"
        ),
        pytest.param(EXPORT, Family.GLM4_MOE, MTP, ["checkpoint.exportMegatron"], id="written, with MTP modules"),
        pytest.param(SOURCE, Family.GLM4_MOE, MTP, ["model.config"], id="read, with MTP modules"),
        pytest.param(
            SOURCE | EXPORT | {"training": {"mtpLossCoefficient": 0}},
            Family.GLM4_MOE,
            MTP,
            [],
            id="trained without them",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(
    sections: dict[str, Any], family: Family | None, changes: dict[str, Any], expected: list[str]
) -> None:
    assert refused(sections, family, **changes) == expected


def test_each_family_is_converted_or_says_why_not() -> None:
    assert {*Family} == CONVERTED_FAMILIES | UNCONVERTED_FAMILIES.keys()
    assert not CONVERTED_FAMILIES & UNCONVERTED_FAMILIES.keys()
