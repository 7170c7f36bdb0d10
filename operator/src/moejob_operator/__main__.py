"""python -m moejob_operator: reads the settings, then runs until it is asked to stop."""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from moejob_operator.runtime import logs, process
from moejob_operator.runtime.settings import read_settings

# Objects made and not yet freed.
_COLLECTED_AFTER = 50_000


def main() -> int:
    """Run one replica."""
    settings = read_settings(sys.argv[1:])
    logs.configure(settings.log_level, logs.LogFormat(settings.log_format))
    _collect_seldom()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process.run(settings))


def _collect_seldom() -> None:
    """Nothing here is made of cycles but what frameworks leave; going through 10,000 pods to find none takes seconds.

    What is imported stays, and need not be gone through.
    """
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER, *gc.get_threshold()[1:])


if __name__ == "__main__":
    sys.exit(main())
