"""An API server with one job and its pods. It serves logs as a kubelet does: from whole seconds, cut at any byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from moejob_api.contract.names import Label
from moejob_client.api_client import ApiClient
from moejob_client.credentials import Credentials
from moejob_client.jobs import AsyncClient

START = 1_800_000_000 * 10**9
NAMESPACE = "team"


def stamp(nanoseconds: int) -> str:
    """The time as a kubelet writes it."""
    second, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


@dataclass
class ServedPod:
    """A pod, its log as (time, text), and whether its container has ended."""

    name: str
    uid: str
    index: int = 0
    attempt: int = 1
    node: str = "node-1"
    lines: list[tuple[int, str]] = field(default_factory=list)
    state: str = "running"
    job: str = "job"

    def body(self, version: int) -> dict[str, Any]:
        labels = {
            Label.JOB: self.job,
            Label.ROLE: "trainer",
            Label.ATTEMPT: str(self.attempt),
            Label.INDEX: str(self.index),
        }
        metadata = {"name": self.name, "namespace": NAMESPACE, "uid": self.uid, "labels": labels}
        status = {"name": "trainer", "restartCount": 0, "state": {self.state: {}}}
        return {
            "metadata": metadata | {"resourceVersion": str(version)},
            "spec": {"nodeName": self.node, "containers": [{"image": "of-the-pod"}]},
            "status": {"phase": self.state.title(), "containerStatuses": [status]},
        }


class PodLogServer:
    """The state of the cluster; `cut_after` ends each connection of a log after as many bytes."""

    def __init__(self) -> None:
        self.pods: dict[str, ServedPod] = {}
        self.phase = "Running"
        self.status: dict[str, Any] = {"layout": {"gpusPerPod": 2}}
        self.cuts: itertools.cycle[int | None] = itertools.cycle([None])
        self.connections = 0
        self.is_denied = False
        self.is_away = False
        self.run_folder = Path("nowhere")
        self.mount_path = "/moejob"
        self.image: str | None = None
        self.spares = 0
        self.readers: list[dict[str, Any]] = []
        # Programs that stand for modules of the image, by `-m`; their only argument is the pod.
        self.modules: dict[str, str] = {}
        # A connection that breaks has no more of a program's output, and no status.
        self.most_output: int | None = None
        self._version = 1
        self._news = asyncio.Condition()
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []
        self._clock = START

    def job(self) -> dict[str, Any]:
        metadata = {"name": "job", "namespace": NAMESPACE, "uid": "uid-job", "resourceVersion": str(self._version)}
        spec = {"storage": {"mountPath": self.mount_path}, "resources": {"image": self.image, "spares": self.spares}}
        return {"metadata": metadata, "spec": spec, "status": self.status | {"phase": self.phase}}

    async def add_pod(self, pod: ServedPod) -> ServedPod:
        self.pods[pod.name] = pod
        await self._add_event("pods", "ADDED", pod.body(self._version + 1))
        return pod

    async def change_pod(self, pod: ServedPod, state: str) -> None:
        pod.state = state
        await self._add_event("pods", "MODIFIED", pod.body(self._version + 1))

    async def delete_pod(self, pod: ServedPod) -> None:
        del self.pods[pod.name]
        await self._add_event("pods", "DELETED", pod.body(self._version + 1))

    async def end_job(self, phase: str = "Succeeded") -> None:
        self.phase = phase
        await self._add_event("moetrainingjobs", "MODIFIED", self.job())

    async def write(self, pod: ServedPod, text: str, step: int = 100_000_000) -> None:
        """Add a line, a tenth of a second after the last one."""
        self._clock += step
        pod.lines.append((self._clock, text))
        async with self._news:
            self._news.notify_all()

    async def _add_event(self, plural: str, kind: str, body: dict[str, Any]) -> None:
        self._version += 1
        self._events.append(
            (
                self._version,
                plural,
                kind,
                body | {"metadata": body["metadata"] | {"resourceVersion": str(self._version)}},
            )
        )
        async with self._news:
            self._news.notify_all()

    async def set_away(self, is_away: bool) -> None:
        """Refuse every request and break every watch, or answer again."""
        self.is_away = is_away
        async with self._news:
            self._news.notify_all()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.is_away:
            return refuse(503, "etcd is gone")
        if request.path.endswith("/exec"):
            return await self._run_program(request)
        if request.method == "POST":
            return await self._create_object(request)
        if request.method == "DELETE":
            await self.delete_pod(self.pods[request.path.rpartition("/")[2]])
            return web.json_response({"kind": "Status", "metadata": {}})
        parts = request.path.strip("/").split("/")
        if parts[-1] == "log":
            return await self._serve_log(request, parts[-2])
        plural = "pods" if "pods" in parts else "moetrainingjobs"
        if parts[-1] != plural:
            return self._serve_object(plural, parts[-1])
        if "watch" in request.query:
            return await self._serve_watch(request, plural)
        pods = [pod for pod in self.pods.values() if pod.job]
        items = [pod.body(self._version) for pod in pods] if plural == "pods" else [self.job()]
        metadata = {"resourceVersion": str(self._version)}
        return web.json_response({"apiVersion": "v1", "kind": "List", "metadata": metadata, "items": items})

    def _serve_object(self, plural: str, name: str) -> web.Response:
        if plural == "moetrainingjobs":
            return web.json_response(self.job())
        if name in self.pods:
            return web.json_response(self.pods[name].body(self._version))
        return refuse(404, f'pods "{name}" not found')

    async def _serve_watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        version = int(request.query["resourceVersion"])
        while True:
            for number, of, kind, body in [event for event in self._events if event[0] > version]:
                version = number
                if of == plural:
                    await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")
            async with self._news:
                await self._news.wait_for(partial(self._has_news, version))
            if self.is_away:
                assert request.transport is not None
                request.transport.abort()
                return response

    async def _create_object(self, request: web.Request) -> web.Response:
        if request.path.endswith("/moetrainingjobs"):
            return web.json_response(self.job())
        return await self._create_reader(request)

    async def _create_reader(self, request: web.Request) -> web.Response:
        if self.is_denied:
            return refuse(403, 'pods is forbidden: User "u" cannot create resource "pods" in API group ""')
        body = await request.json()
        self.readers.append(body)
        pod = ServedPod(body["metadata"]["generateName"] + "x", "uid-reader", job="")
        await self.add_pod(pod)
        return web.json_response(pod.body(self._version))

    async def _run_program(self, request: web.Request) -> web.StreamResponse:
        """Run the command here: the run folder of the job is a folder of this machine."""
        if self.is_denied:
            return refuse(403, "no words of this arrive")
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        _, *arguments = request.query.getall("command")
        words = [word.replace(f"{self.mount_path}/job", str(self.run_folder)) for word in arguments]
        if words[0] == "-m" and words[1] in self.modules:
            words = ["-c", self.modules[words[1]], request.path.split("/")[-2]]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, errors = await process.communicate()
        output = output if self.most_output is None else output[: self.most_output]
        for begin in range(0, len(output), 7_000):
            await socket.send_bytes(b"\x01" + output[begin : begin + 7_000])
        if self.most_output is None:
            await socket.send_bytes(b"\x02" + errors)
            status = {"status": "Failure" if process.returncode else "Success", "message": "exit code 1"}
            await socket.send_bytes(b"\x03" + json.dumps(status).encode())
        await socket.close()
        return socket

    def _has_news(self, version: int) -> bool:
        return self._version > version or self.is_away

    def _refuse_log(self, pod: ServedPod | None) -> web.Response:
        if self.is_denied:
            return refuse(403, 'pods "a" is forbidden: User "u" cannot get resource "pods/log" in API group ""')
        if pod is None:
            return refuse(404, 'pods "job-0" not found')
        return refuse(400, 'container "trainer" in pod is waiting to start: ContainerCreating')

    async def _serve_log(self, request: web.Request, name: str) -> web.StreamResponse:
        pod = self.pods.get(name)
        if pod is None or self.is_denied or pod.state == "waiting":
            return self._refuse_log(pod)
        self.connections += 1
        response = web.StreamResponse()
        await response.prepare(request)
        since, left, sent = request.query.get("sinceTime", "")[:19], next(self.cuts), 0
        while True:
            for time, text in pod.lines[sent:]:
                sent += 1
                line = b"" if stamp(time)[:19] < since else f"{stamp(time)} {text}\n".encode()
                if left is not None and len(line) > left:
                    await response.write(line[:left])
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                left = None if left is None else left - len(line)
                await response.write(line)
            if "follow" not in request.query or pod.state == "terminated" or self.pods.get(name) is not pod:
                return response
            async with self._news:
                await self._news.wait()


def refuse(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "reason": "", "message": message}, status=code)


class _NoMetrics:
    def count_request(self, verb: str, resource: str, code: str, seconds: float) -> None:
        """Count nothing."""


@asynccontextmanager
async def serve_pod_logs() -> AsyncIterator[tuple[PodLogServer, AsyncClient]]:
    """A server, and a client of it."""
    server = PodLogServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = ApiClient(Credentials(f"http://127.0.0.1:{runner.addresses[0][1]}"), _NoMetrics(), concurrency=8, seconds=5)
    async with AsyncClient(http, NAMESPACE) as client:
        yield server, client
    await runner.cleanup()
