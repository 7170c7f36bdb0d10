"""The ValidatingAdmissionPolicy of jobs: rules between fields, and what never changes.

It sees new jobs and new specs, but not the hundreds of statuses of a job. The API server asks the rules of a definition
at every write of a status too, where they took it 5 ms of CPU of 10: reading a whole spec twice to find it equal.
The message names everything that is wrong, for the API server reports the first validation that fails and no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from moejob_api.crd.immutability import immutable_fields
from moejob_api.crd.structural import Schema
from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_api.job.fields import JobField, job_fields
from moejob_api.rules.object_rules import OBJECT_RULES
from moejob_api.rules.object_rules.object_rule import ObjectRule

NAME = f"{PLURAL}.{GROUP}"
SEPARATOR = "; "


def policy_with_binding(rules: Sequence[ObjectRule] = OBJECT_RULES) -> tuple[Schema, Schema]:
    """The policy, and the binding that puts it in force everywhere."""
    return _policy_manifest(job_fields().fields["spec"], rules), _BINDING


def refusal_message(rule: ObjectRule) -> str:
    """The words in which the policy refuses a job that breaks a rule."""
    return f"{rule.path}: {rule.summary}"


def _policy_manifest(spec: JobField, rules: Sequence[ObjectRule]) -> Schema:
    immutability_cel = _failing_messages((field.cel, field.message) for field in immutable_fields(spec))
    rules_cel = _failing_messages((_rule_on_job(rule, spec), refusal_message(rule)) for rule in rules)
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": NAME},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": [GROUP],
                        "apiVersions": [VERSION],
                        "operations": ["CREATE", "UPDATE"],
                        "resources": [PLURAL],
                        "scope": "Namespaced",
                    }
                ]
            },
            # A job that older rules took keeps its labels and finalizers changeable.
            "matchConditions": [
                {"name": "new-spec", "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec"}
            ],
            "variables": [
                {"name": "changed", "expression": f"request.operation == 'UPDATE' ? {immutability_cel} : []"},
                {"name": "broken", "expression": rules_cel},
            ],
            "validations": [
                _require_no_messages(
                    "changed", "Forbidden", "a section of spec that is immutable has changed; create a new job"
                ),
                _require_no_messages("broken", "Invalid", "the spec breaks many rules; `moejob validate` names them"),
            ],
        },
    }


_BINDING: Schema = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicyBinding",
    "metadata": {"name": NAME},
    "spec": {"policyName": NAME, "validationActions": ["Deny"]},
}


def _failing_messages(conditions: Iterable[tuple[str, str]]) -> str:
    """CEL of the messages whose conditions do not hold."""
    messages = ",\n".join(f"  ({holds}) ? '' : {json.dumps(message)}" for holds, message in conditions)
    return f"[\n{messages}\n].filter(message, message != '')"


def _require_no_messages(variable: str, reason: str, if_too_long: str) -> Schema:
    """The validation that a list of messages is empty."""
    return {
        "expression": f"variables.{variable}.size() == 0",
        "messageExpression": f"variables.{variable}.join('{SEPARATOR}')",
        "message": if_too_long,
        "reason": reason,
    }


def _rule_on_job(rule: ObjectRule, spec: JobField) -> str:
    """The rule about `object`, where what it is on may be absent, or a profile may give what it misses."""
    # No policy can read a profile. Webhook and operator hold the merged job to each rule.
    healed = "has(object.spec.profile) || " if rule.profile_may_heal else ""
    absent = "".join(f"!has(object.{path}) || " for path in _optional_holders(rule.on, spec))
    return f"{healed}{absent}[object.{rule.on}].all(self, {rule.cel})"


def _optional_holders(path: str, spec: JobField) -> Iterator[str]:
    """The objects on the way to a path that a job may lack."""
    names = path.split(".")[1:]
    holder = spec
    for depth, name in enumerate(names, start=1):
        inner = holder.fields[name]
        if name not in holder.required and inner.default is None:
            yield ".".join(["spec", *names[:depth]])
        holder = inner
