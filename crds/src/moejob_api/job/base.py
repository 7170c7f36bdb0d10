"""The parts that all sections of the API are made of: the frozen base model and the field types that carry bounds.

Knows nothing of any single field of a job. Modules of this package do not import annotations from __future__: pydantic
would evaluate the text of each field's type, a fifth of the time that it takes to build the models.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A frozen part of the API: camelCase outside, snake_case inside, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=False,
    )


# Upper bounds exist so that a mistyped size is refused by name instead of overflowing int64 in the API server
# or turning a divisor search into an endless loop.
MAX_GROUP = 65_536
MAX_COUNT = 2**31 - 1
# Ranks of one pod. Every poll reads a line for each, from pods that may send any.
MOST_RANKS_OF_A_POD = 64

GroupSize = Annotated[int, Field(ge=1, le=MAX_GROUP)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e9)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e9)]

ShortText = Annotated[str, Field(min_length=1, max_length=253)]
LongText = Annotated[str, Field(min_length=1, max_length=4096)]
# The name of a Kubernetes object: what DNS accepts as a subdomain.
ObjectName = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
# A resource or label key, optionally with a domain in front.
QualifiedName = Annotated[
    str, Field(max_length=317, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
]
AbsolutePath = Annotated[str, Field(max_length=1024, pattern=r"^/[^:]*$")]
# Whole numbers are accepted beside text, as everywhere in Kubernetes.
Quantity = Annotated[
    Annotated[int, Field(ge=0, le=MAX_COUNT)]
    | Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")],
    Field(json_schema_extra={"x-kubernetes-int-or-string": True}),
]
TextMap = Mapping[
    Annotated[str, Field(max_length=317)],
    Annotated[str, Field(max_length=4096)],
]


class Dtype(StrEnum):
    """Floating point types, named as torch and Hugging Face name them."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        match self:
            case Dtype.FLOAT64:
                return 8
            case Dtype.FLOAT32:
                return 4
            case Dtype.BFLOAT16:
                return 2
