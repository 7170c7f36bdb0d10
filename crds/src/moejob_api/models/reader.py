"""Reads single keys of a model's config.json, and refuses what cannot be a model in words its user understands.

Knows no family: which keys matter, and what an absent one means, is for moejob_api.models.families to say.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from moejob_api.problems import InvalidSpec, Problem, Rule

WHERE = "spec.model.source"

# No model comes near these. They keep a mistyped size from building a tuple of 10^30 layers.
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000


def model_error(rule: Rule, message: str) -> InvalidSpec:
    """The error that says why the model of a job cannot be used."""
    return InvalidSpec((Problem(rule, WHERE, message),))


def shown_value(value: object) -> str:
    """A value as it appears in a message, cut to a readable length."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python does not print whole numbers of more than 4300 digits.
        return "a number of too many digits"


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """One config.json; `origin` says in messages where it came from."""

    values: Mapping[str, object]
    origin: str

    def read_size(self, key: str, absent: int | None = None, smallest: int = 1, largest: int = LARGEST_SIZE) -> int:
        """A whole number in bounds; `absent` stands in for a missing key, which is refused otherwise."""
        expected = f"a whole number from {smallest} to {largest}"
        value = self.values.get(key, absent)
        if value is None and key not in self.values:
            self._refuse_missing(key, expected)
        if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
            self._refuse_key(key, expected)
        return value

    def read_first_size(self, *keys: str) -> int:
        """The size under the first of several names that the file uses; the last name is the canonical one."""
        return self.read_size(next((key for key in keys if key in self.values), keys[-1]))

    def read_optional_size(self, key: str) -> int | None:
        """A size, or None where the key is missing or null."""
        return None if self.values.get(key) is None else self.read_size(key)

    def is_null(self, key: str) -> bool:
        """Return whether the key is there and says null, which often means something else than a missing key."""
        return key in self.values and self.values[key] is None

    def read_flag(self, key: str, absent: bool = False) -> bool:
        """true or false."""
        value = self.values.get(key, absent)
        if not isinstance(value, bool):
            self._refuse_key(key, "true or false")
        return value

    def require_positive(self, key: str) -> None:
        """Refuse anything but a finite number above zero."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self._refuse_key(key, "a number above 0")

    def require_one_of(self, key: str, accepted: Sequence[object], why: str) -> None:
        """Refuse a key that is present with any value but the accepted ones; `why` ends with the fix."""
        value = self.values.get(key)
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in accepted):
            expected = " or ".join(shown_value(value) for value in accepted if value is not None)
            self._refuse_key(key, f"{expected}: {why}")

    def read_indices(self, key: str) -> frozenset[int]:
        """A list of layer indices; none where the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
            self._refuse_key(key, "a list of layer indices")
        return frozenset(value)

    def read_kinds(self, key: str, allowed: Sequence[str], count: int) -> tuple[str, ...] | None:
        """One of the allowed words for each layer, or None where the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not all(kind in allowed for kind in value):
            self._refuse_key(key, f"a list of {count} entries (num_hidden_layers), each {' or '.join(allowed)}")
        return tuple(value)

    def require_value(self, key: str, accepted: object, why: str) -> None:
        """Refuses a key that is present with any value but the accepted one."""
        value = self.values.get(key, accepted)
        if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
            self._refuse_key(key, f"{shown_value(accepted)}: {why}")

    def refuse_model(self, message: str) -> NoReturn:
        """Refuses a model whose keys are fine one by one, but not together."""
        raise model_error(Rule.MODEL_CONFIG, f"{self.origin}: {message}")

    def _refuse_key(self, key: str, expected: str) -> NoReturn:
        raise model_error(
            Rule.MODEL_CONFIG, f"{self.origin}: {key} is {shown_value(self.values.get(key))}; expected {expected}"
        )

    def _refuse_missing(self, key: str, expected: str) -> NoReturn:
        raise model_error(Rule.MODEL_CONFIG, f"{self.origin} has no {key}; expected {expected}")
