"""python -m moejob_operator: reads the settings, then runs until it is asked to stop."""

from __future__ import annotations

import asyncio
import sys

from moejob_operator import logs
from moejob_operator.runtime import process
from moejob_operator.runtime.event_loop import EventLoop
from moejob_operator.runtime.settings import read_settings


def main() -> int:
    """Run one replica."""
    settings = read_settings(sys.argv[1:])
    logs.configure_logs(settings.log_level, logs.LogFormat(settings.log_format))
    process.keep_loop_prompt()
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(process.run_operator(settings))


if __name__ == "__main__":
    sys.exit(main())
