"""The models that moejob knows without a network: config.json files shipped with the package, and other names for them.

Owns which names there are; what a config means is for moejob_api.models.families to say. Each file holds the published
values of the keys that matter here, and is called <organization>--<name>.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

_VARIANTS = "variants.json"


def model_names() -> tuple[str, ...]:
    """Every name that `config` answers, sorted."""
    return tuple(sorted(_published_names().values()))


def shipped_names() -> tuple[str, ...]:
    """The names that have a file of their own, sorted; all others are variants of these."""
    paths = (path.name for path in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json").replace("--", "/", 1) for name in paths if "--" in name))


def find_config(name: str) -> Mapping[str, object] | None:
    """The config.json of a Hugging Face name in any case, or None where the catalog lacks it."""
    published_name = _published_names().get(name.lower())
    return None if published_name is None else _read_config(published_name)


def similar_names(name: str) -> tuple[str, ...]:
    """Known names that resemble this one, the best first."""
    entries = _published_names()
    # People leave the organization out more often than they misspell it.
    by_model = {key.partition("/")[2]: key for key in entries}
    wanted = name.lower()
    close_names = get_close_matches(wanted, entries, n=3)
    without_organization = get_close_matches(wanted.rpartition("/")[2], by_model, n=3)
    keys = dict.fromkeys([*close_names, *(by_model[model] for model in without_organization)])
    return tuple(entries[key] for key in keys)[:3]


@cache
def _published_names() -> Mapping[str, str]:
    """Names as published, by their lower-case form."""
    return {name.lower(): name for name in (*shipped_names(), *_read_variants())}


@cache
def _read_variants() -> Mapping[str, Mapping[str, object]]:
    """Models that differ from a shipped one, named `like`, in no key or in a few."""
    variants: Mapping[str, Mapping[str, object]] = _parse_file(_VARIANTS)
    return variants


@cache
def _read_config(name: str) -> Mapping[str, object]:
    variant = _read_variants().get(name)
    if variant is None:
        return dict(_parse_file(f"{name.replace('/', '--', 1)}.json"))
    differing = {key: value for key, value in variant.items() if key != "like"}
    return {**_read_config(str(variant["like"])), **differing}


def _parse_file(file: str) -> dict[str, dict[str, object]]:
    parsed: dict[str, dict[str, object]] = json.loads((files(__name__) / file).read_text("utf-8"))
    return parsed
