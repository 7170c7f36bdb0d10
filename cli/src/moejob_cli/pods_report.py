"""The pods of a planned job as YAML, as the operator would create them.

The operator's package makes them, and is looked up when it is asked for: a client that has none plans all the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from moejob_api.contract.pods import Environment
from moejob_api.documents.writing import yaml_text
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_cli.inputs import PlannedJob


def pods_text(answer: PlannedJob) -> str:
    """Return the manifests of the first pod of each role of an accepted job."""
    return "---\n".join(yaml_text(_without_spec(pod)) for pod in _first_pods(answer))


def _first_pods(answer: PlannedJob) -> Iterator[dict[str, Any]]:
    try:
        preview = importlib.import_module("moejob_operator.children.preview")
    except ModuleNotFoundError:
        message = "--pods needs the operator's package beside this one; install moejob-operator"
        raise InvalidSpec((Problem(Rule.UNREADABLE, "", message),)) from None
    pods: Iterator[dict[str, Any]] = preview.preview_pods(answer.job, answer.plan)
    return pods


def _without_spec(pod: dict[str, Any]) -> dict[str, Any]:
    """Leave out the spec, which has hundreds of fields and would be most of the text."""
    for container in pod["spec"]["containers"]:
        for variable in container["env"]:
            if variable["name"] == Environment.SPEC:
                variable["value"] = "(the spec of the job, with all defaults)"
    return pod
