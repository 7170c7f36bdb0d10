"""Values that cannot be meant are refused, by name, before anything reaches a cluster."""

from __future__ import annotations

import pytest

from charts import CHART, Helm, HelmError, Values


@pytest.mark.parametrize(
    ("values", "says"),
    [
        pytest.param({"replica": 2}, "additional properties 'replica'", id="a value that is not there"),
        pytest.param(
            {"settings": {"worker": 3}}, "'/settings': additional properties 'worker'", id="a setting that is not"
        ),
        pytest.param({"settings": {"httpPort": 80}}, "'/settings': additional", id="a setting that the chart decides"),
        pytest.param({"settings": {"workers": 0}}, "'/settings/workers': minimum", id="no worker"),
        pytest.param({"settings": {"workers": "many"}}, "got string, want integer", id="a word for a number"),
        pytest.param({"settings": {"logLevel": "debug"}}, "'DEBUG', 'INFO', 'WARNING', 'ERROR'", id="a level in small"),
        pytest.param({"replicas": 0}, "'/replicas': minimum: got 0, want 1", id="no replica"),
        pytest.param({"namespaces": "team-a"}, "'/namespaces': got string, want array", id="one namespace as a word"),
        pytest.param({"namespaces": ["Team"]}, "'/namespaces/0': 'Team' does not match", id="no name of a namespace"),
        pytest.param({"namespaces": ["a", "a"]}, "items at 0 and 1 are equal", id="a namespace twice"),
        pytest.param({"images": {"operator": "operator:1"}}, "'/images/operator'", id="a tag in a name"),
        pytest.param({"images": {"registry": "https://a.b"}}, "'/images/registry'", id="an address as a registry"),
        pytest.param({"images": {"pullSecrets": ["a"]}}, "'/images/pullSecrets/0'", id="a bare pull secret"),
        pytest.param({"webhook": {"certificates": "Mine"}}, "'SelfSigned', 'CertManager'", id="an unknown certifier"),
        pytest.param({"webhook": {"failurePolicy": "fail"}}, "'Fail', 'Ignore'", id="a policy in small"),
        pytest.param({"webhook": {"timeoutSeconds": 31}}, "'/webhook/timeoutSeconds'", id="more than Kubernetes waits"),
        pytest.param(
            {"webhook": {"issuerRef": {"name": "ca"}}},
            "set it to CertManager, or remove issuerRef",
            id="an idle issuer",
        ),
        pytest.param(
            {"namespaces": ["team-a"]},
            'namespaces are ["team-a"], and webhook.certificates SelfSigned needs a right beyond them',
            id="a certificate of its own for some namespaces",
        ),
        pytest.param(
            {"leaderElection": {"leaseSeconds": 10}},
            "renewDeadlineSeconds 10 must be at least a second less than leaseSeconds 10",
            id="a lease as short as its deadline",
        ),
        pytest.param({"leaderElection": {"retrySeconds": 6}}, "one lost renewal must not", id="a single try"),
        pytest.param({"resources": {"limit": {"memory": "1Gi"}}}, "'/resources': additional", id="a limit misspelt"),
        pytest.param(
            {"podLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name", id="a label that selects"
        ),
        pytest.param({"runAsUser": 0}, "'/runAsUser': minimum: got 0, want 1", id="root"),
        pytest.param({"networkPolicy": {"apiServerPorts": []}}, "'/networkPolicy/apiServerPorts'", id="no way out"),
        pytest.param(
            {"metrics": {"serviceMonitor": {"interval": "soon"}}}, "'/metrics/serviceMonitor/interval'", id="i"
        ),
        pytest.param(
            {"networkPolicy": {"jobs": False, "jobsEgress": True}}, "networkPolicy.jobs is off", id="egress alone"
        ),
        pytest.param(
            {"networkPolicy": {"jobsEgressRules": [{"ports": [{"port": 9000}]}]}}, "nothing bounds", id="rules alone"
        ),
        pytest.param({"limits": {"image": []}}, "'/limits': additional properties 'image'", id="a limit that is not"),
        pytest.param({"limits": {"images": ["a.b*"]}}, "'/limits/images/0': 'a.b*' does not", id="half a registry"),
        pytest.param({"limits": {"secrets": "none"}}, "'/limits/secrets': got string", id="a word for names"),
        pytest.param({"limits": {"labels": None}}, "missing property 'labels'", id="labels without a limit"),
        pytest.param({"limits": {"reserved": None}}, "missing property 'reserved'", id="reserved keys forgotten"),
        pytest.param({"crd": {"keep": "no"}}, "'/crd/keep': got string, want boolean", id="a word for a switch"),
    ],
)
def test_it_is_refused_with_its_name_and_what_is_wrong(helm: Helm, values: Values, says: str) -> None:
    with pytest.raises(HelmError) as refused:
        helm.render(values)
    assert says in str(refused.value)


def test_a_cluster_that_is_too_old_is_refused(helm: Helm) -> None:
    with pytest.raises(HelmError, match=r">=1\.30\.0"):
        helm.run("template", "moejob", CHART, "--kube-version=1.29.9")
