"""No key of Transformers' configs is silently ignored: the gate's tables hold all that its classes and code know."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
from transformers import AutoConfig
from transformers.models.auto import configuration_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model_configs import config as small_config
from moejob_api.models.families import READ_AS, TEXT_PARTS, shape_of
from moejob_api.models.families.keys import KEYS, PositiveKey, RestrictedKey
from moejob_api.models.families.refused import ABSENT_MODELS, UNLIKE_MODELS
from moejob_api.models.shape import Family
from moejob_api.problems import InvalidSpec

# Set by Transformers itself, and never in a file.
INTERNAL = {"_attn_implementation", "_experts_implementation", "get_text_config"}


@pytest.mark.parametrize("family", list(Family))
def test_every_key_of_the_config_class_of_a_family_has_an_entry(family: Family) -> None:
    known = CONFIG_MAPPING[family]()
    theirs = known.to_dict().keys() | known.attribute_map.keys() | inspect.signature(type(known)).parameters.keys()
    assert not theirs - KEYS[family].keys()


@pytest.mark.parametrize("family", list(Family))
def test_every_key_that_the_model_code_of_a_family_reads_has_an_entry(family: Family) -> None:
    # The text part of a model that reads images too is in the model's module.
    name = family.removesuffix("_text")
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    assert "rms_norm_eps" in set(_keys_read(module))
    of_other_parts = CONFIG_MAPPING[name]().to_dict().keys() if name in TEXT_PARTS else set()
    assert not set(_keys_read(module)) - KEYS[family].keys() - INTERNAL - of_other_parts


def _keys_read(module: ModuleType) -> Iterator[str]:
    """The attributes of anything called config, taken directly or by getattr."""
    tree = ast.parse(inspect.getsource(module))
    tree.body = [part for part in tree.body if not isinstance(part, ast.ClassDef) or "Vision" not in part.name]
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("config") | ast.Attribute(attr="config"), attr=key):
                yield key
            case ast.Call(
                func=ast.Name("getattr"),
                args=[ast.Name("config") | ast.Attribute(attr="config"), ast.Constant(str(key)), *_],
            ):
                yield key
            case _:
                pass


@pytest.mark.parametrize("family", list(Family))
def test_what_the_config_class_says_by_default_is_not_refused(family: Family) -> None:
    small = small_config(family)
    # The class of DeepSeek-V3 puts in 128 for what is missing, whatever the number of heads.
    small.setdefault("num_key_value_heads", small["num_attention_heads"])
    assert shape_of(AutoConfig.for_model(**small).to_dict()) == shape_of(small)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        (family, key)
        for family in Family
        for key, treatment in KEYS[family].items()
        if isinstance(treatment, RestrictedKey | PositiveKey)
    ],
)
def test_a_key_with_limits_is_refused_beyond_them(family: Family, key: str) -> None:
    with pytest.raises(InvalidSpec, match=f"{key} is -0.5; expected"):
        shape_of(small_config(family, **{key: -0.5}))


def test_transformers_has_the_refused_models_but_those_that_it_is_said_to_lack_or_are_read_as_others() -> None:
    # Its own list: Megatron-Bridge adds others to the mapping when it is imported.
    known = {*vars(configuration_auto)["CONFIG_MAPPING_NAMES"]}
    assert {*UNLIKE_MODELS} - known == set()
    assert {*ABSENT_MODELS, *READ_AS} & known == set()
