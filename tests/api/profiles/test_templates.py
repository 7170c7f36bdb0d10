"""A job's pod template over that of its profile."""

from __future__ import annotations

from typing import Any

import pytest

from moejob_api.profiles.templates import merge_templates


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def container(name: str = "logs", **fields: Any) -> dict[str, Any]:
    return {"name": name, **fields}


SHELL, PAGE = {"exec": {"command": ["true"]}}, {"httpGet": {"port": 80}}


@pytest.mark.parametrize(
    ("profile", "job", "merged"),
    [
        pytest.param(
            {"metadata": {"labels": {"a": "1", "b": "1"}}},
            {"metadata": {"labels": {"b": "2"}}} | spec(dnsPolicy="None"),
            {"metadata": {"labels": {"a": "1", "b": "2"}}} | spec(dnsPolicy="None"),
            id="maps are joined",
        ),
        pytest.param(
            spec(containers=[container(image="a:1", env=[{"name": "A", "value": "1"}, {"name": "B", "value": "1"}])]),
            spec(containers=[container(env=[{"name": "A", "valueFrom": {}}]), container("other")]),
            spec(
                containers=[
                    container(image="a:1", env=[{"name": "A", "valueFrom": {}}, {"name": "B", "value": "1"}]),
                    container("other"),
                ]
            ),
            id="containers are the same by their names, variables are whole",
        ),
        pytest.param(
            spec(volumes=[{"name": "a", "emptyDir": {}}]),
            spec(volumes=[{"name": "a", "hostPath": {"path": "/x"}}, {"name": "b", "emptyDir": {}}]),
            spec(volumes=[{"name": "a", "hostPath": {"path": "/x"}}, {"name": "b", "emptyDir": {}}]),
            id="a volume has one source",
        ),
        pytest.param(
            spec(tolerations=[{"key": "a"}]),
            spec(tolerations=[{"key": "a"}, {"key": "b"}]),
            spec(tolerations=[{"key": "a"}, {"key": "b"}]),
            id="tolerations are added",
        ),
        pytest.param(
            spec(containers=[container(livenessProbe=SHELL)]),
            spec(containers=[container(livenessProbe=PAGE)]),
            spec(containers=[container(livenessProbe=PAGE)]),
            id="a probe is one value",
        ),
        pytest.param(
            spec(nodeSelector={"a": "1"}, hostNetwork=True),
            spec(hostNetwork=None),
            spec(nodeSelector={"a": "1"}),
            id="a null takes away",
        ),
        pytest.param(
            spec(containers=[container()]),
            spec(containers=[{"image": "nameless"}]),
            spec(containers=[{"image": "nameless"}]),
            id="a list that no rule would take stays as the job has it",
        ),
    ],
)
def test_a_template_over_another_is(profile: Any, job: Any, merged: Any) -> None:
    assert merge_templates(profile, job) == merged
