"""The kinds of profiles, and the fields of a job that a profile may give.

A profile has the sections of a job's spec, and in them the fields that say where a job runs and not what it trains.
resources.accelerator is none of them: CPU is never chosen for a person who does not ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import cache

from moejob_api.job import BETA_VERSION, GROUP
from moejob_api.job.fields import FieldKind, JobField, job_fields

API_VERSION = f"{GROUP}/{BETA_VERSION}"


class ProfileKind(StrEnum):
    """The kind of a profile: of one namespace, or of the cluster."""

    NAMESPACED = "MoETrainingProfile"
    CLUSTER = "ClusterMoETrainingProfile"

    @property
    def plural(self) -> str:
        """The name of the resource in paths and roles."""
        return f"{self.lower()}s"


PROFILED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "resources": (
        "gpusPerNode",
        "gpuResource",
        "gpuType",
        "gpuMemoryGiB",
        "cpu",
        "memory",
        "sharedMemory",
        "qosClass",
        "image",
        "rolloutImage",
        "imagePullPolicy",
        "imagePullSecrets",
        "nodeSelector",
        "tolerations",
        "env",
        "envFrom",
        "labels",
        "annotations",
        "schedulerName",
        "priorityClassName",
        "runtimeClassName",
        "serviceAccount",
        "rdma",
        "topologyKey",
    ),
    "storage": ("storageClass", "accessModes"),
    "lifecycle": ("gang", "queue"),
    "podTemplate": ("trainer", "rollout"),
}
_SECTION_DESCRIPTIONS = {
    "resources": "GPUs, images, placement.",
    "storage": "The volume of jobs that make a new claim.",
    "lifecycle": "Gang scheduler and queue.",
    "podTemplate": "Patches of the pods, under those of the job.",
}


@cache
def profile_fields() -> JobField:
    """The spec of a profile as a field: no field is required, and no scalar has a default."""
    spec = job_fields().fields["spec"]
    return JobField(
        kind=FieldKind.OBJECT,
        description="Fields of spec that jobs take from this profile; a job's own values win.",
        default={},
        fields={section: _profiled_section(section, spec.fields[section]) for section in PROFILED_FIELDS},
    )


def profiled_paths() -> Iterator[tuple[str, str]]:
    """Yield the section and the name of each field that a profile may give."""
    for section, names in PROFILED_FIELDS.items():
        yield from ((section, name) for name in names)


def _profiled_section(section: str, field: JobField) -> JobField:
    return JobField(
        kind=FieldKind.OBJECT,
        description=_SECTION_DESCRIPTIONS[section],
        # The policy of limits reads lists and maps of resources: they are always there, as in a job.
        default=None if section == "podTemplate" else {},
        fields={name: _without_default(field.fields[name]) for name in PROFILED_FIELDS[section]},
    )


def _without_default(field: JobField) -> JobField:
    return field if field.default in ([], {}) else replace(field, default=None)
