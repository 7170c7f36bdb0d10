"""Bars of the hub's client that draw nothing and report the share of files that are there."""

from __future__ import annotations

import io
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

from moejob_trainer.runtime.heartbeats import ShareReport


def reporting_bars(report_share: ShareReport) -> type[tqdm]:
    """Return the class of bars for `snapshot_download`.

    Files count, not bytes: the client learns the size of a file when its download begins, so a share of bytes would
    fall with each file.
    """

    class ReportingBar(tqdm):
        # Of a thread that redraws bars.
        monitor_interval = 0

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "disable": False, "file": io.StringIO()})  # type: ignore[no-untyped-call]  # the client's

        def update(self, n: float | None = 1) -> bool | None:
            has_drawn: bool | None = super().update(n)
            if self.unit == "it" and self.total:
                report_share(int(self.n), int(self.total))
            return has_drawn

    return ReportingBar
