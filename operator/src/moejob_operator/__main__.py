"""python -m moejob_operator: reads the settings, then runs until it is told to stop."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime

from moejob_operator import logs, process
from moejob_operator.children.blueprint import Images
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import Cluster, JobKey
from moejob_operator.judging import Judge
from moejob_operator.observed import Specs
from moejob_operator.planning.situation import Setting
from moejob_operator.reconcile import Reconciler
from moejob_operator.settings import Settings, read_settings


def main() -> int:
    """Run one replica."""
    settings = read_settings(sys.argv[1:])
    logs.configure(settings.log_level, logs.LogFormat(settings.log_format))
    return asyncio.run(process.run(settings, _reconcile(settings)))


def _reconcile(settings: Settings) -> process.Reconcile:
    judge, specs = Judge(), Specs()
    images = Images(settings.trainer_image, settings.rollout_image)

    async def reconcile(key: JobKey, cluster: Cluster, apis: frozenset[GangApi]) -> float | None:
        return await Reconciler(judge, Setting(images, apis), lambda: datetime.now(UTC), specs)(key, cluster)

    return reconcile


if __name__ == "__main__":
    sys.exit(main())
