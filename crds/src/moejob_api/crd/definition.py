"""The whole CustomResourceDefinitions, of jobs and of profiles: names, columns and schema put together.

Rules between fields are the policy's (policy.py): the API server would check a definition's rules at every write of a
status too.
"""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from moejob_api.crd.immutability import immutable_sections
from moejob_api.crd.structural import LIST_KEYS, Schema, schema_of
from moejob_api.job import BETA_VERSION, GROUP, KIND, PLURAL, VERSION
from moejob_api.job.fields import JobField, job_fields
from moejob_api.profiles.fields import ProfileKind, profile_fields

# Name, type, path, and whether it takes -o wide to see it. NAME comes first by itself.
COLUMNS = (
    ("Method", "string", ".spec.method", False),
    ("Phase", "string", ".status.phase", False),
    ("GPUs", "integer", ".status.layout.gpus", False),
    ("Nodes", "integer", ".status.layout.nodes", False),
    ("Step", "string", ".status.display.step", False),
    ("Score", "string", ".status.display.score", False),
    ("Eval", "string", ".status.display.evalScore", False),
    ("Eval Loss", "string", ".status.display.evalLoss", True),
    ("Speed", "string", ".status.display.speed", True),
    ("ETA", "string", ".status.display.eta", True),
    ("Why", "string", ".status.why.blocker", True),
    ("Restarts", "integer", ".status.restarts.total", True),
    ("Age", "date", ".metadata.creationTimestamp", False),
)

_PROFILE_COLUMNS = (
    ("GPU", "string", ".spec.resources.gpuType", False),
    ("GPUs of a node", "integer", ".spec.resources.gpusPerNode", False),
    ("Queue", "string", ".spec.lifecycle.queue", False),
    ("Image", "string", ".spec.resources.image", True),
    ("Age", "date", ".metadata.creationTimestamp", False),
)
_PROFILE_NAMES = {ProfileKind.NAMESPACED: "moeprofile", ProfileKind.CLUSTER: "clustermoeprofile"}

# Who wrote which field is of no use where one writer writes all of them, and keeping count of it doubles a job's size.
_ATOMIC_MAP: Schema = {"x-kubernetes-map-type": "atomic"}


def crd_definition() -> Schema:
    """The CustomResourceDefinition of a MoETrainingJob."""
    fields = job_fields()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["moejob", "mtj"],
                # A job owns pods and services, which `kubectl get all` shows; it should not hide behind them.
                "categories": ["all"],
            },
            "scope": "Namespaced",
            # Both versions have the same fields, so a change of apiVersion is all of a conversion.
            "conversion": {"strategy": "None"},
            # The older one is what etcd stores: a definition that lacks a stored version is refused, so a rollback to
            # the first release would be.
            "versions": [_version_entry(VERSION, fields, is_stored=True), _version_entry(BETA_VERSION, fields)],
        },
    }


def profile_definition(kind: ProfileKind) -> Schema:
    """The CustomResourceDefinition of a kind of profiles. Profiles have no status: nothing acts on one."""
    spec = schema_of(profile_fields(), "spec")
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.value,
                "listKind": f"{kind}List",
                "plural": kind.plural,
                "singular": kind.lower(),
                "shortNames": [_PROFILE_NAMES[kind]],
            },
            "scope": "Cluster" if kind is ProfileKind.CLUSTER else "Namespaced",
            "versions": [
                {
                    "name": BETA_VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": _printer_columns(_PROFILE_COLUMNS),
                    "schema": {"openAPIV3Schema": _profile_schema(kind, spec)},
                }
            ],
        },
    }


def _profile_schema(kind: ProfileKind, spec: Schema) -> Schema:
    where = "jobs of every namespace" if kind is ProfileKind.CLUSTER else "jobs of its namespace"
    return {
        "description": f"Values that {where} take by spec.profile: images, GPUs, placement, storage class, queue.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
        },
    }


def _printer_columns(columns: tuple[tuple[str, str, str, bool], ...]) -> list[JsonValue]:
    return [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": 1} if is_wide else {})
        for name, kind, path, is_wide in columns
    ]


def _version_entry(name: str, job: JobField, *, is_stored: bool = False) -> Schema:
    return {
        "name": name,
        "served": True,
        "storage": is_stored,
        "subresources": {"status": {}},
        "additionalPrinterColumns": _printer_columns(COLUMNS),
        "schema": {"openAPIV3Schema": _root_schema(job)},
    }


def _root_schema(job: JobField) -> Schema:
    stale = [path for path in LIST_KEYS if job.find_field(path) is None]
    if stale:
        raise LookupError(f"LIST_KEYS names lists that no longer exist: {', '.join(stale)}")
    spec, status = job.fields["spec"], job.fields["status"]
    spec_schema = schema_of(spec, "spec")
    sections: Any = spec_schema["properties"]
    for name in immutable_sections(spec):
        sections[name].update(_ATOMIC_MAP)
    return {
        "description": job.description,
        "type": "object",
        "required": ["spec"],
        "x-kubernetes-validations": _name_rules(job.fields["metadata"].fields["name"]),
        "properties": {
            # These three are the API server's own: it checks them and lets nothing be said about them here.
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec_schema,
            "status": schema_of(status, "status") | _ATOMIC_MAP,
        },
    }


def _name_rules(name: JobField) -> list[JsonValue]:
    return [
        {
            "rule": f"size(self.metadata.name) <= {name.longest}",
            "message": f"metadata.name has more than {name.longest} characters; the names of pods are made from it and "
            "must fit a DNS label",
        },
        {
            "rule": f"self.metadata.name.matches('{name.pattern}')",
            "message": "metadata.name must be lower-case letters, digits and '-', beginning with a letter "
            "and not ending with '-'",
        },
    ]
