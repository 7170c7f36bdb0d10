"""The types that the models may use: nothing that the CRD cannot express gets lost silently."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import Field

from moejob_api.crd.structural import schema_of
from moejob_api.job.base import ApiModel, Quantity, TextMap
from moejob_api.job.fields import FieldKind, UnsupportedFieldError, fields_of, job_fields


class Inner(ApiModel):
    """Inside."""

    size: Annotated[int, Field(ge=1, le=8, description="Size.")] = 2


class Node(ApiModel):
    """Contains itself."""

    child: Annotated[Self | None, Field(description="Child.")] = None


def make_model_class(annotation: Any, **settings: Any) -> type[ApiModel]:
    """A model with one field called `it`."""
    said = Field(**({"description": "It."} | settings))
    return type("Model", (ApiModel,), {"__annotations__": {"it": Annotated[annotation, said]}, "__doc__": "M."})


@pytest.mark.parametrize(
    ("unsupported", "says"),
    [
        pytest.param(make_model_class(int | str), "a choice between types", id="union"),
        pytest.param(make_model_class(Inner | TextMap), "a choice between types", id="union of models"),
        pytest.param(make_model_class(Any), "type any", id="any"),
        pytest.param(make_model_class(None), "type null", id="only null"),
        pytest.param(make_model_class(tuple[int, str]), "prefixItems", id="pair"),
        pytest.param(make_model_class(tuple[()]), "what its items are", id="list of nothing"),
        pytest.param(make_model_class(set[str]), "uniqueItems", id="set"),
        pytest.param(make_model_class(int, multiple_of=8), "multipleOf", id="multiple"),
        pytest.param(make_model_class(dict[str, Any]), "a mapping of anything", id="map of anything"),
        pytest.param(make_model_class(Mapping[Literal["a", "b"], str]), "keys with enum", id="map with named keys"),
        pytest.param(make_model_class(Literal[1, 2]), "a whole field with enum", id="numbered choices"),
        pytest.param(make_model_class(int, description=""), "no description of it", id="no description"),
        pytest.param(
            make_model_class(Inner, default=Inner(size=4)),
            "differs from the defaults",
            id="default unlike those inside",
        ),
        pytest.param(
            make_model_class(str, json_schema_extra={"x-kubernetes-embedded-resource": True}),
            "embedded",
            id="extension",
        ),
        pytest.param(Node, "contains itself", id="recursion"),
    ],
)
def test_a_construct_without_a_place_in_the_crd_is_named_and_refused(unsupported: type[ApiModel], says: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=says) as refused:
        fields_of(unsupported)
    assert unsupported.__name__ in str(refused.value)


@pytest.mark.parametrize(
    ("annotation", "settings", "schema"),
    [
        pytest.param(
            int, {"ge": 1, "le": 8}, {"type": "integer", "format": "int64", "minimum": 1, "maximum": 8}, id="int"
        ),
        pytest.param(
            float,
            {"gt": 0, "lt": 1},
            {
                "type": "number",
                "format": "double",
                "minimum": 0,
                "exclusiveMinimum": True,
                "maximum": 1,
                "exclusiveMaximum": True,
            },
            id="open range",
        ),
        pytest.param(bool | None, {"default": None}, {"type": "boolean"}, id="an optional field is absent, not null"),
        pytest.param(bool, {"default": False}, {"type": "boolean", "default": False}, id="false is a default"),
        pytest.param(Literal["a", "b"], {}, {"type": "string", "enum": ["a", "b"]}, id="choices"),
        pytest.param(datetime, {}, {"type": "string", "format": "date-time"}, id="format"),
        pytest.param(
            Quantity,
            {"default": "1Gi"},
            {
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "x-kubernetes-int-or-string": True,
                "default": "1Gi",
                "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$",
                "maxLength": 32,
                "minimum": 0,
                "maximum": 2**31 - 1,
            },
            id="quantity",
        ),
        pytest.param(
            Inner,
            {"default": Inner()},
            {
                "type": "object",
                "default": {},
                "properties": {
                    "size": {
                        "description": "Size.",
                        "type": "integer",
                        "format": "int64",
                        "default": 2,
                        "minimum": 1,
                        "maximum": 8,
                    }
                },
            },
            id="an object with defaults only is {}",
        ),
        pytest.param(
            tuple[Inner, ...],
            {"max_length": 2, "default": ()},
            {
                "type": "array",
                "default": [],
                "maxItems": 2,
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "properties": {
                        "size": {
                            "description": "Size.",
                            "type": "integer",
                            "format": "int64",
                            "default": 2,
                            "minimum": 1,
                            "maximum": 8,
                        }
                    },
                },
            },
            id="list",
        ),
        pytest.param(
            TextMap,
            {"max_length": 3},
            {
                "type": "object",
                "maxProperties": 3,
                "additionalProperties": {"type": "string", "maxLength": 4096},
                "x-kubernetes-validations": [
                    {"rule": "self.all(key, size(key) <= 317)", "message": "keys have at most 317 characters"}
                ],
            },
            id="map",
        ),
    ],
)
def test_a_field_becomes_its_schema(annotation: Any, settings: dict[str, Any], schema: dict[str, Any]) -> None:
    field = fields_of(make_model_class(annotation, **settings)).fields["it"]
    assert schema_of(field, "it") == {"description": "It.", **schema}


def test_a_field_is_found_by_its_path() -> None:
    tensor = job_fields().find_field("spec.parallelism.tensor")
    assert tensor is not None
    assert (tensor.kind, tensor.minimum, tensor.default) == (FieldKind.WHOLE, 1, 1)


@pytest.mark.parametrize("path", ["spec.nothing", "spec.nothing.at.all", "spec.data.train.format", ""])
def test_no_field_is_found_where_there_is_none(path: str) -> None:
    assert job_fields().find_field(path) is None
