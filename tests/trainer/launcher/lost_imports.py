"""A module that keeps the fork server from its imports: it ends or stops it, as often as the test's folder says."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_orders = sorted(Path(os.environ["MOEJOB_RUN_FOLDER"]).glob("import-*"))
if _orders:
    # import-N-SIGNAL: one for each import, taken in the order of N.
    _number = int(_orders[0].name.rpartition("-")[2])
    _orders[0].unlink()
    os.kill(os.getpid(), _number)
    signal.pause()
