"""The merge of a job and its profile. Pure: reads no cluster, and checks nothing, for the merged job is checked whole.

The order, from weakest to strongest: defaults, the profile, the job. The API server writes defaults into each job, so
a value that equals its default counts as not given, and the profile's stands. Maps are joined key by key and lists of
variables name by name, where the job wins; tolerations, secrets and envFrom are added to the profile's. Everything else
is one value, the job's where it has one.

A field that would have no meaning in the job is left out: the storage class of a claim that exists, and images and
templates of engines that the job does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moejob_api.api_bodies import as_mapping
from moejob_api.job.fields import job_fields
from moejob_api.job.grpo import RolloutPlacement
from moejob_api.profiles.fields import profiled_paths
from moejob_api.profiles.templates import merge_templates

# Sections of a spec, and in them fields.
Values = dict[str, dict[str, Any]]
Raw = Mapping[str, Any]


def profile_values(spec: Raw, profile_spec: Raw) -> Values:
    """Return the values that a job has because of a profile, its own part of joined ones included."""
    values: Values = {}
    for section, name in profiled_paths():
        profile_value = as_mapping(profile_spec.get(section)).get(name)
        if profile_value in (None, [], {}) or not _has_meaning(spec, section, name):
            continue
        job_value = as_mapping(spec.get(section)).get(name)
        merged = _merge_field(section, name, job_value, profile_value)
        if merged != job_value:
            values.setdefault(section, {})[name] = merged
    return values


def with_values(spec: Raw, values: Raw) -> dict[str, Any]:
    """Return the spec of a job with the values of its profile, which it then no longer names."""
    merged = {name: section for name, section in spec.items() if name != "profile"}
    for section, fields in values.items():
        merged[section] = {**as_mapping(spec.get(section)), **as_mapping(fields)}
    return merged


def _merge_field(section: str, name: str, job_value: Any, profile_value: Any) -> Any:
    default = job_fields().fields["spec"].fields[section].fields[name].default
    if job_value is None or job_value == default:
        return profile_value
    return _MERGES.get((section, name), _job_value)(profile_value, job_value)


def _has_meaning(spec: Raw, section: str, name: str) -> bool:
    match section, name:
        case "storage", _:
            return as_mapping(spec.get("storage")).get("claimName") is None
        case ("resources", "rolloutImage") | ("podTemplate", "rollout"):
            return _has_engine_pods(spec)
        case "resources", "gpuType" | "gpuMemoryGiB":
            # Each says how much memory a GPU has: a job that gives one takes neither.
            resources = as_mapping(spec.get("resources"))
            return resources.get("gpuType") is None and resources.get("gpuMemoryGiB") is None
        case _:
            return True


def _has_engine_pods(spec: Raw) -> bool:
    rollout = as_mapping(as_mapping(spec.get("grpo")).get("rollout"))
    return rollout.get("placement") == RolloutPlacement.SEPARATE


def _job_value(_: Any, job_value: Any) -> Any:
    return job_value


def _join_maps(profile_value: Any, job_value: Any) -> Any:
    return (
        {**profile_value, **job_value}
        if isinstance(job_value, Mapping) and isinstance(profile_value, Mapping)
        else job_value
    )


def _add_items(profile_value: Any, job_value: Any) -> Any:
    if not isinstance(job_value, list) or not isinstance(profile_value, list):
        return job_value
    return [*profile_value, *(item for item in job_value if item not in profile_value)]


def _join_variables(profile_value: Any, job_value: Any) -> Any:
    return merge_templates(profile_value, job_value, "env")


_MERGES: Mapping[tuple[str, str], Callable[[Any, Any], Any]] = {
    ("resources", "nodeSelector"): _join_maps,
    ("resources", "labels"): _join_maps,
    ("resources", "annotations"): _join_maps,
    ("resources", "imagePullSecrets"): _add_items,
    ("resources", "tolerations"): _add_items,
    ("resources", "envFrom"): _add_items,
    ("resources", "env"): _join_variables,
    ("podTemplate", "trainer"): merge_templates,
    ("podTemplate", "rollout"): merge_templates,
}
