"""Requests to stop a run, when signals come faster than the loop reads them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

SIGNALS = 30_000
# Slower than a handler runs, so that handlers do not pile up.
PAUSE_SECONDS = 0.00002
LONGEST_SECONDS = 120.0
# A handler that asks for a lock which the thread that it interrupts holds never returns.
PROGRAM = f"""
import os
from moejob_cli.running.supervision import StopRequests

requests = StopRequests()
with requests.handle_signals():
    print("listening", flush=True)
    while len(requests.signals) < {SIGNALS}:
        requests.wait(1.0)
    os._exit(0)
"""


def test_signals_in_quick_succession_do_not_freeze_the_loop_that_waits_for_them() -> None:
    program = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        until = time.monotonic() + LONGEST_SECONDS
        try:
            while process.poll() is None and time.monotonic() < until:
                process.send_signal(signal.SIGHUP)
                time.sleep(PAUSE_SECONDS)
            assert process.returncode == 0
        finally:
            process.kill()
