"""python -m moejob_operator: reads the settings, then runs until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import sys
from datetime import UTC, datetime

import uvloop

from moejob_operator import logs, process
from moejob_operator.children.blueprint import Images
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import Cluster, JobKey
from moejob_operator.judging import Judge
from moejob_operator.observed import Specs
from moejob_operator.planning.situation import Setting
from moejob_operator.reconcile import Reconciler
from moejob_operator.remembered import Remembered
from moejob_operator.settings import Settings, read_settings

# Objects made and not yet freed.
_COLLECTED_AFTER = 50_000


def main() -> int:
    """Run one replica."""
    settings = read_settings(sys.argv[1:])
    logs.configure(settings.log_level, logs.LogFormat(settings.log_format))
    work = process.run(settings, _reconcile(settings))
    _collect_seldom()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _reconcile(settings: Settings) -> process.Reconcile:
    judge, specs, asked = Judge(), Specs(), Remembered[datetime]()
    images = Images(settings.trainer_image, settings.rollout_image)

    async def reconcile(key: JobKey, cluster: Cluster, apis: frozenset[GangApi]) -> float | None:
        return await Reconciler(judge, Setting(images, apis), lambda: datetime.now(UTC), specs, asked)(key, cluster)

    return reconcile


def _collect_seldom() -> None:
    """Nothing here is made of cycles but what frameworks leave; going through 10,000 pods to find none takes seconds.

    What is imported stays, and need not be gone through.
    """
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER, *gc.get_threshold()[1:])


if __name__ == "__main__":
    sys.exit(main())
