"""The chart as people install it, with Helm on a real control plane, whose kwok plays the kubelets.

kwok runs no containers: what the pods of a release would do is done by processes under the same accounts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from charts import CHART, RELEASE, HelmError, RenderedChart, Values
from cluster.control_plane.operators import SERVES_ITS_OWN, Home
from cluster.control_plane.plane import ControlPlane
from cluster.waiting import until

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEFINITION = f"{DEFINITIONS}/moetrainingjobs.moejob.dev"
HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
TEST = "moejob-operator-test"
# Ten times what a quiet machine needs.
SECONDS = 180


@dataclass
class Release:
    """A release in a namespace that holds pods to the restricted standard."""

    plane: ControlPlane
    namespace: str
    folder: Path

    def helm(self, verb: str, *arguments: str | Path, values: Values | None = None) -> str:
        """Return what Helm prints; it waits until all is ready."""
        at = (f"--kubeconfig={self.plane.kubeconfig}", f"--namespace={self.namespace}")
        waits = ("--wait", f"--timeout={SECONDS}s") if verb in ("install", "upgrade", "rollback", "uninstall") else ()
        return self.plane.helm.run(verb, RELEASE, *at, *waits, *arguments, values=values)

    def install(self, values: Values | None = None, *flags: str, chart: Path = CHART) -> None:
        """Helm install, of the folder in the tree or of a packed chart."""
        self.helm("install", chart, *flags, values={**SERVES_ITS_OWN, **(values or {})})

    def upgrade(self, chart: Path, values: Values | None = None, *flags: str) -> None:
        """Helm upgrade."""
        self.helm("upgrade", chart, *flags, values={**SERVES_ITS_OWN, **(values or {})})

    def remove(self) -> None:
        """Leave nothing of it, the definition included, and with that no job."""
        self.helm("uninstall", "--ignore-not-found")
        self.plane.kubectl("delete", "crd", "--ignore-not-found", "--selector=app.kubernetes.io/name=moejob")

    @property
    def home(self) -> Home:
        """For processes of the operator as this release has it."""
        at = (f"--kubeconfig={self.plane.kubeconfig}", f"--namespace={self.namespace}")
        text = self.plane.helm.run("get", "manifest", RELEASE, *at)
        manifest = RenderedChart(tuple(found for found in yaml.load_all(text, yaml.CSafeLoader) if found))
        return Home(self.plane, manifest, self.namespace, self.folder)

    def get(self, path: str) -> Any:
        """An object in the release's namespace."""
        group, _, rest = path.rpartition(":")
        root = f"/apis/{group}" if group else "/api/v1"
        return self.plane.api.get(f"{root}/namespaces/{self.namespace}/{rest}")

    def remains(self) -> set[str]:
        """All that is labelled as a part of moejob, wherever it is, jobs and what belongs to them left out."""
        kinds = "pod,service,endpointslice,deployment,replicaset,sa,secret,cm,lease,pdb,netpol,role,rolebinding"
        kinds += ",clusterrole,clusterrolebinding,crd,validatingwebhookconfiguration"
        kinds += ",validatingadmissionpolicy,validatingadmissionpolicybinding"
        names = ("get", kinds, "--all-namespaces", "--selector=app.kubernetes.io/name=moejob", "--output=name")
        return set(self.plane.kubectl(*names).split())


@contextmanager
def release(plane: ControlPlane, folder: Path) -> Iterator[Release]:
    """A namespace to install into. On the way out nothing of the release is left, the definition included."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    created = plane.api.create("/api/v1/namespaces", {"metadata": {"generateName": "moejob-", "labels": labels}})
    made = Release(plane, created["metadata"]["name"], folder)
    until(lambda: plane.has_service_account(made.namespace), waiting_for="a service account")
    try:
        yield made
    finally:
        made.remove()
        plane.kubectl("delete", "namespace", "--wait=false", made.namespace)


def pack_chart(plane: ControlPlane, folder: Path) -> Path:
    """Pack the chart as a release does; what is installed from the archive has nothing of the tree beside it."""
    plane.helm.run("package", CHART, f"--destination={folder}")
    [archive] = folder.glob("moejob-*.tgz")
    return archive


def changed_chart(folder: Path, version: str, *, new_field: str) -> Path:
    """The chart of a later version, whose jobs know one field more."""
    copy = folder / f"moejob-{version}"
    shutil.copytree(CHART, copy)
    about = yaml.safe_load((copy / "Chart.yaml").read_text())
    (copy / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": version, "appVersion": version}))
    file = copy / "files" / "moetrainingjobs.yaml"
    definition = yaml.load(file.read_text(), yaml.CSafeLoader)
    for fields in fields_of(definition):
        fields[new_field] = {"type": "string", "description": "Of the next version."}
    # In the order of the generated file: the chart puts its labels in where metadata begins.
    file.write_text(yaml.safe_dump(definition, sort_keys=False))
    return copy


def fields_of(definition: Any) -> list[dict[str, Any]]:
    """The fields of a job's spec, in each version."""
    schemas = [version["schema"]["openAPIV3Schema"] for version in definition["spec"]["versions"]]
    return [schema["properties"]["spec"]["properties"] for schema in schemas]


def said_by_helm_test(installed: Release, url: str) -> str:
    """Return what `helm test` says while the test's own command runs, under its own account, in place of the pod."""
    said: list[str] = []
    helm = threading.Thread(target=lambda: said.append(_helm_test(installed)))
    helm.start()
    try:
        pod = until(lambda: _test_pod(installed), waiting_for="the pod of the test")
        done = _run_for(installed, pod, url)
        state = {"phase": "Failed" if done.returncode else "Succeeded"}
        installed.plane.kubectl(
            "patch", "pod", TEST, f"--namespace={installed.namespace}", "--subresource=status", "--type=merge",
            f"--patch={yaml.safe_dump({'status': state})}",
        )  # fmt: skip
    finally:
        helm.join(2 * SECONDS)
    return f"{done.stdout}{done.stderr}{''.join(said)}"


def _helm_test(installed: Release) -> str:
    try:
        return installed.helm("test", f"--timeout={2 * SECONDS}s")
    except HelmError as failed:
        return str(failed)


def _test_pod(installed: Release) -> Any:
    listed = installed.get(f"pods?fieldSelector=metadata.name={TEST}")["items"]
    return next((pod for pod in listed if pod["status"].get("phase") == "Running"), None)


def _run_for(installed: Release, pod: Any, url: str) -> subprocess.CompletedProcess[str]:
    """Run the command of a pod outside the cluster: there the address of the operator is another."""
    account = pod["spec"]["serviceAccountName"]
    kubeconfig = installed.plane.service_account_kubeconfig(installed.namespace, account)
    [_, *arguments] = pod["spec"]["containers"][0]["command"]
    given = [argument for argument in arguments if not argument.startswith("--url=")]
    return subprocess.run(
        [sys.executable, *given, f"--url={url}", f"--kubeconfig={kubeconfig}", "--seconds=10"],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
