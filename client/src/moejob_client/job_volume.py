"""The run folder of a job, read through a pod: one that lives, else one made for it and deleted afterwards.

A laptop cannot mount a claim. docs/decisions/volumes.md says why a pod reads it, and what that costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_api.contract.names import PodRole
from moejob_client.errors import Forbidden, NotFound, Retryable
from moejob_client.failures import JobRequestError, RequestFailure, explained_failures
from moejob_client.job_view import JobView
from moejob_client.pod_exec import ProgramError, RunningContainer, run_program
from moejob_client.pod_logs import PodView

if TYPE_CHECKING:
    from moejob_client.api_client import ApiClient

# The group that owns files on volumes, as in the pods of a job.
_GROUP_ID = 65532
# A reader whose command was killed ends by itself.
_READER_SECONDS = 3600
_START_SECONDS, _PAUSE_SECONDS = 300.0, 0.5
_FOLDER = "/moejob"
READER_LABEL = "moejob.dev/reader-of"

# Runs by `python -c` in any image with Python. The files match patterns below a folder; links are not followed out.
_PACK_FILES = """
import glob, os, sys, tarfile
folder, patterns = sys.argv[1], sys.argv[2:]
if os.path.isdir(folder):
    os.chdir(folder)
else:
    patterns = []
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
    for name in sorted({name for pattern in patterns for name in glob.glob(pattern, recursive=True)}):
        if os.path.isfile(name) and not os.path.islink(name):
            try:
                archive.add(name, recursive=False)
            except FileNotFoundError:
                pass
"""
_LIST_FILES = """
import glob, os, sys
folder, patterns = sys.argv[1], sys.argv[2:]
if os.path.isdir(folder):
    os.chdir(folder)
    for pattern in patterns:
        for name in glob.glob(pattern, recursive=True):
            print(name)
"""
# The file from a byte on, or that part of its end; nothing where it does not exist.
_READ_FILE = """
import os, shutil, sys
path, offset = sys.argv[1], int(sys.argv[2])
if os.path.isfile(path):
    with open(path, "rb") as file:
        file.seek(offset if offset >= 0 else max(0, os.path.getsize(path) + offset))
        shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
"""


@dataclass(frozen=True, slots=True)
class JobVolume:
    """A run folder that can be read."""

    http: ApiClient
    container: RunningContainer
    folder: str

    async def read_file(self, name: str, offset: int = 0) -> AsyncGenerator[bytes]:
        """Yield a file from an offset on, a negative one from its end; nothing where there is no such file."""
        async with aclosing(self._run_in_pod(_READ_FILE, [f"{self.folder}/{name}", str(offset)])) as chunks:
            async for chunk in chunks:
                yield chunk

    async def list_files(self, patterns: Sequence[str]) -> list[str]:
        """Return the names of the files that match patterns, relative to the run folder."""
        output = b""
        async with aclosing(self._run_in_pod(_LIST_FILES, [self.folder, *patterns])) as chunks:
            async for chunk in chunks:
                output += chunk
        return output.decode(errors="replace").splitlines()

    async def pack_files(self, patterns: Sequence[str]) -> AsyncGenerator[bytes]:
        """Yield a tar archive of the files that match patterns; `**` is any number of folders."""
        async with aclosing(self._run_in_pod(_PACK_FILES, [self.folder, *patterns])) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _run_in_pod(self, program: str, arguments: Sequence[str]) -> AsyncGenerator[bytes]:
        command = ["python", "-c", program, *arguments]
        try:
            with explained_failures(f"cannot read the volume by {self.container.pod}"):
                async with aclosing(run_program(self.http, self.container, command)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except ProgramError as error:
            text = f"the volume cannot be read by {self.container.pod}: {error}"
            raise JobRequestError(RequestFailure.REFUSED, text) from error


@asynccontextmanager
async def open_volume(
    http: ApiClient, job: JobView, pods: Sequence[PodView], report: Callable[[str], object]
) -> AsyncIterator[JobVolume]:
    """Give access to a job's run folder, through a running trainer pod or a reader."""
    spec = api_bodies.as_mapping(job.body.get("spec"))
    storage = api_bodies.as_mapping(spec.get("storage"))
    running = _running_trainer(pods)
    if running is not None:
        mount_path = api_bodies.as_text(storage.get("mountPath")) or _FOLDER
        container = RunningContainer(job.namespace, running.name, running.role)
        yield JobVolume(http, container, f"{mount_path.rstrip('/')}/{job.name}")
        return
    path = f"/api/v1/namespaces/{job.namespace}/pods"
    report(f"no pod of {job.name} runs; starting one that reads its volume")
    with explained_failures("cannot create a pod that reads the volume"):
        created = await http.create(path, reader_pod(job, pods))
    name = api_bodies.as_text(api_bodies.object_metadata(created).get("name"))
    try:
        await _await_start(http, f"{path}/{name}")
        yield JobVolume(http, RunningContainer(job.namespace, name, "reader"), f"{_FOLDER}/{job.name}")
    finally:
        # A pod that cannot be deleted now ends by its deadline.
        with suppress(NotFound, Forbidden, Retryable):
            await http.delete(f"{path}/{name}", {"gracePeriodSeconds": 0})


def has_running_trainer(pods: Sequence[PodView]) -> bool:
    """Return whether the run folder can be read without a further pod."""
    return _running_trainer(pods) is not None


def _running_trainer(pods: Sequence[PodView]) -> PodView | None:
    return next((pod for pod in pods if pod.role == PodRole.TRAINER and pod.is_running), None)


def reader_pod(job: JobView, pods: Sequence[PodView]) -> Raw:
    """Return a pod that only holds the job's claim, with an image and a user that the job's pods have."""
    spec = api_bodies.as_mapping(job.body.get("spec"))
    resources = api_bodies.as_mapping(spec.get("resources"))
    claim = api_bodies.as_mapping(spec.get("storage")).get("claimName") or f"{job.name}-storage"
    ended = next((pod for pod in pods if pod.role == PodRole.TRAINER), None)
    pod_spec = api_bodies.as_mapping(ended.body.get("spec")) if ended is not None else {}
    containers = api_bodies.as_mappings(pod_spec.get("containers"))
    image = (containers[0].get("image") if containers else None) or resources.get("image")
    if not image:
        text = f"{job.name} has neither pods nor resources.image, so no image to read its volume with is known"
        fix = "mount its claim in a pod of your own"
        raise JobRequestError(RequestFailure.REFUSED, f"{text}; {fix}: {claim}")
    secrets = pod_spec.get("imagePullSecrets") or [{"name": name} for name in resources.get("imagePullSecrets") or ()]
    security = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": _GROUP_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    container: dict[str, Any] = {
        "name": "reader",
        "image": image,
        "command": ["python", "-c", f"import time; time.sleep({_READER_SECONDS})"],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "storage", "mountPath": _FOLDER, "readOnly": True}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": f"{job.name}-reader-", "labels": {READER_LABEL: job.name}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _READER_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": secrets,
            "securityContext": pod_spec.get("securityContext") or security,
            "tolerations": pod_spec.get("tolerations") or [],
            "containers": [container],
            "volumes": [{"name": "storage", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }


async def _await_start(http: ApiClient, path: str) -> None:
    """Wait until a reader runs; what holds it up is the error after five minutes."""
    deadline = asyncio.get_running_loop().time() + _START_SECONDS
    while True:
        with explained_failures("cannot start a pod that reads the volume"):
            pod = PodView(await http.get(path))
        if pod.phase == "Running":
            return
        if pod.phase in ("Failed", "Succeeded") or asyncio.get_running_loop().time() > deadline:
            reason = pod.waiting_reason or pod.phase
            text = f"the pod that reads the volume does not start: {reason}; `kubectl describe` its claim"
            raise JobRequestError(RequestFailure.REFUSED, text)
        await asyncio.sleep(_PAUSE_SECONDS)
