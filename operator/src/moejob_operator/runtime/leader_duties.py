"""Duties of a leader beside reconciling: begin with what its predecessor left, and resync."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moejob_client.errors import NotFound
from moejob_operator.actions import Kind
from moejob_operator.cluster import Forbidden, JobKey, Retryable
from moejob_operator.kube_api.informers import Informer
from moejob_operator.kube_api.live_lists import LiveLists
from moejob_operator.logs import Log
from moejob_operator.runtime.job_watch import JobWatch
from moejob_operator.runtime.work_queue import WorkQueue

log = Log(__name__)

_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Leader:
    """Leads until stopped or cancelled. All lists share one cache and one record of gang schedulers."""

    queue: WorkQueue[JobKey]
    lists: Sequence[LiveLists]
    watches: Sequence[Informer | JobWatch]
    resync_seconds: float
    report_leading: Callable[[bool], None]

    async def lead(self) -> None:
        """Work until the queue is stopped, or until cancelled."""
        self.report_leading(True)
        try:
            await self._queue_all_jobs()
            async with asyncio.TaskGroup() as group:
                resync = group.create_task(self._resync_forever())
                await self.queue.run()
                resync.cancel()
        finally:
            self.report_leading(False)

    async def _queue_all_jobs(self) -> None:
        for watch in self.watches:
            await watch.listed.wait()
        # What the last leader wrote at its end may not have reached our watches yet.
        while True:
            if await self._refresh_lists(Kind.JOB, Kind.POD_GROUP):
                break
            await asyncio.sleep(_RETRY_SECONDS)
        for key in self._all_keys():
            self.queue.add(key)

    async def _resync_forever(self) -> None:
        while True:
            for key in self._all_keys():
                # Not before half a period: all have just been reconciled. At random: no job has to wait for all others.
                self.queue.add(key, random.uniform(0.5, 1.5) * self.resync_seconds)
            await asyncio.sleep(self.resync_seconds)
            await self._refresh_lists(Kind.POD_GROUP)

    async def _refresh_lists(self, *kinds: Kind) -> bool:
        """List these kinds and find gang schedulers again; return whether that succeeded."""
        try:
            await self.lists[0].gangs.refresh()
            for lists in self.lists:
                for kind in kinds:
                    await lists.fill_cache(kind)
        except (NotFound, Forbidden, Retryable) as error:
            log.warning("cannot list", error=str(error))
            return False
        return True

    def _all_keys(self) -> list[JobKey]:
        return self.lists[0].cache.all_keys()
