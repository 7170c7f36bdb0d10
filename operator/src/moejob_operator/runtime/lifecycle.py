"""The parts that kopf's startup starts and its cleanup stops: every part of a replica that is not kopf's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import kopf

from moejob_api.profiles.reading import TrainingProfile
from moejob_api.rules.limits import JobLimits
from moejob_operator.logs import Log
from moejob_operator.runtime import health
from moejob_operator.runtime.assembly import ReplicaParts, assemble_replica
from moejob_operator.runtime.job_watch import receive_job_event
from moejob_operator.runtime.kopf_session import KopfSession
from moejob_operator.runtime.kopf_settings import configure_kopf
from moejob_operator.runtime.settings import Settings, read_settings

log = Log(__name__)

CLOSING_SECONDS = 5.0


class Operator:
    """The running parts of a replica. A part that ends sets `stopping`, for the process, and fails the probe."""

    def __init__(self, parts: ReplicaParts, stack: AsyncExitStack, stopping: asyncio.Event) -> None:
        self.has_failed = False
        self.job_watches = parts.job_watches
        self._parts = parts
        self._stack = stack
        self._stopping = stopping
        self._is_stopping = False
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    @classmethod
    async def start(cls, settings_of_kopf: kopf.OperatorSettings, memo: kopf.Memo) -> Self:
        """Build and start every part, and set kopf up."""
        settings: Settings = memo.get("settings") or read_settings(())
        _check_namespaces(settings, is_clusterwide=settings_of_kopf.peering.clusterwide)
        stack = AsyncExitStack()
        try:
            parts = await assemble_replica(stack, settings)
            operator = cls(parts, stack, memo.get("stopping") or asyncio.Event())
            configure_kopf(settings_of_kopf, parts.reviewers, parts.admission)
            handler = health.health_handler(parts.metrics, operator.find_troubles, operator.missing_parts)
            await stack.enter_async_context(health.serve_health(handler, settings.http_port))
        except BaseException:
            await stack.aclose()
            raise
        operator._start_parts()
        log.info("started", identity=settings.identity, namespaces=settings.namespaces)
        return operator

    async def stop(self) -> None:
        """Let the work in hand end, give up the Lease, then stop the rest."""
        self._is_stopping = True
        self._parts.leader.queue.stop()
        self._parts.leadership.stop()
        # The election ends once the work in hand has ended and the Lease is released. Until then the watches run, for
        # that work reads what they bring.
        await asyncio.wait({self._tasks["election"]}, timeout=self._parts.settings.stop_seconds)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.wait(self._tasks.values(), timeout=CLOSING_SECONDS)
        await self._stack.aclose()

    @property
    def limits(self) -> JobLimits:
        """The names that jobs may ask for."""
        return self._parts.settings.job_limits

    def find_profile(self, namespace: str, name: str) -> TrainingProfile | None:
        """Return the profile of that name, for the thread of a review."""
        return self._parts.profiles.find(namespace, name)

    @property
    def session(self) -> KopfSession:
        """The session that kopf logs in with."""
        return self._parts.kopf_session

    def receive_event(self, event: kopf.RawEvent) -> None:
        """Take in an event of a job."""
        receive_job_event(event, self._parts.cache, self._parts.leader.queue.add)

    def find_troubles(self) -> Mapping[str, str]:
        """Return the lasting troubles: parts that have ended, watches that kopf has given up."""
        ended_parts = {name: "has ended" for name, task in self._tasks.items() if task.done() and not self._is_stopping}
        return ended_parts | {watch.name: "kopf asks nothing any more" for watch in self.job_watches if watch.is_dead}

    def missing_parts(self) -> Mapping[str, str]:
        """Return the parts that this replica still lacks to do all of its work."""
        if self._is_stopping:
            return {"operator": "is stopping"}
        watches = self._parts.leader.watches
        lacks = {watch.name: "has not listed yet" for watch in watches if not watch.listed.is_set()}
        keeper = self._parts.keeper
        if keeper is not None and keeper.pair is None:
            lacks["webhook"] = f"the Secret {keeper.store.secret} holds no certificate yet"
        elif keeper is not None and not self._parts.admission.is_serving:
            lacks["webhook"] = "is not served yet"
        return lacks

    def _start_parts(self) -> None:
        self._start_part("election", self._parts.leadership.run(self._parts.leader.lead))
        for informer in self._parts.informers:
            self._start_part(informer.name, informer.run())
        if self._parts.keeper is not None:
            self._start_part("webhook", self._parts.keeper.run())

    def _start_part(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work, name=name)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        raised = None if task.cancelled() else task.exception()
        if self._is_stopping and raised is None:
            return
        self.has_failed = True
        log.error("a part has failed", part=task.get_name(), raised=raised)
        self._stopping.set()


def _check_namespaces(settings: Settings, *, is_clusterwide: bool) -> None:
    if is_clusterwide is not bool(settings.namespaces):
        return
    watched = "all namespaces" if is_clusterwide else "some namespaces"
    configured = ", ".join(settings.namespaces) or "all"
    raise ValueError(f"kopf watches {watched}, but MOEJOB_OPERATOR_NAMESPACES is {configured}: give both the same")
