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


def names() -> tuple[str, ...]:
    """Every name that `config` answers, sorted."""
    return tuple(sorted(_entries().values()))


def shipped() -> tuple[str, ...]:
    """The names that have a file of their own, sorted; all others are variants of these."""
    paths = (path.name for path in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json").replace("--", "/", 1) for name in paths if "--" in name))


def config(name: str) -> Mapping[str, object] | None:
    """The config.json of a Hugging Face name in any case, or None where the catalog lacks it."""
    known = _entries().get(name.lower())
    return None if known is None else _config(known)


def near(name: str) -> tuple[str, ...]:
    """Known names that resemble this one, the best first."""
    entries = _entries()
    # People leave the organization out more often than they misspell it.
    by_model = {key.partition("/")[2]: key for key in entries}
    wanted = name.lower()
    close = get_close_matches(wanted, entries, n=3)
    without_organization = get_close_matches(wanted.rpartition("/")[2], by_model, n=3)
    found = dict.fromkeys([*close, *(by_model[model] for model in without_organization)])
    return tuple(entries[key] for key in found)[:3]


@cache
def _entries() -> Mapping[str, str]:
    """Names as published, by their lower-case form."""
    return {name.lower(): name for name in (*shipped(), *_variants())}


@cache
def _variants() -> Mapping[str, Mapping[str, object]]:
    """Models that differ from a shipped one, named `like`, in no key or in a few."""
    variants: Mapping[str, Mapping[str, object]] = _parsed(_VARIANTS)
    return variants


@cache
def _config(name: str) -> Mapping[str, object]:
    variant = _variants().get(name)
    if variant is None:
        return dict(_parsed(f"{name.replace('/', '--', 1)}.json"))
    differing = {key: value for key, value in variant.items() if key != "like"}
    return {**_config(str(variant["like"])), **differing}


def _parsed(file: str) -> dict[str, dict[str, object]]:
    parsed: dict[str, dict[str, object]] = json.loads((files(__name__) / file).read_text("utf-8"))
    return parsed
