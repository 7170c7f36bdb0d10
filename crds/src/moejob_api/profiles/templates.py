"""A job's pod template laid over that of its profile: one template, which the operator then lays over its pods.

Containers, volumes and variables are the same by their names, mounts by their paths; maps are joined by their keys.
Tolerations and envFrom are added. Every other list, and every handler, is the job's where it has one: two halves of
a probe make no probe. A null in the job's template takes the profile's value away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}
_ADDED = frozenset({"tolerations", "envFrom"})
# Of an object in these lists another source would be a second one.
_WHOLE_ITEMS = frozenset({"volumes", "env", "volumeMounts"})
_WHOLE = frozenset({"livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "dnsConfig"})


def merge_templates(under: object, over: object, name: str = "") -> Any:
    """Return `over` laid over `under`, values of the field `name`."""
    match under, over:
        case Mapping(), Mapping() if name not in _WHOLE:
            return _merge_maps(under, over)
        case list(), list() if name in _KEYS:
            return _merge_items(under, over, name)
        case list(), list() if name in _ADDED:
            return [*under, *(item for item in over if item not in under)]
        case _:
            return over


def _merge_maps(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for name, value in over.items():
        merged[name] = merge_templates(under[name], value, name) if name in under else value
    return {name: value for name, value in merged.items() if value is not None}


def _merge_items(under: list[Any], over: list[Any], name: str) -> list[Any]:
    key = _KEYS[name]
    if not all(isinstance(item, Mapping) and isinstance(item.get(key), str) for item in (*under, *over)):
        # The rules of templates refuse such a list, and their words should be about what the job says.
        return over
    merged = {item[key]: item for item in under}
    for item in over:
        is_joined = item[key] in merged and name not in _WHOLE_ITEMS
        merged[item[key]] = merge_templates(merged[item[key]], item) if is_joined else item
    return list(merged.values())
