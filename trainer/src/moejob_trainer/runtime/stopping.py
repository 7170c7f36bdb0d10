"""A run that is asked to end does so after a step, on all ranks alike."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist


class AgreedStop:
    """SIGTERM asks for a stop; the ranks agree on it, for a rank that stopped alone would leave the others waiting."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_requested = False

    def listen_for_signals(self) -> None:
        """Take SIGTERM of this process."""
        signal.signal(signal.SIGTERM, lambda *_: self.request_stop())

    def request_stop(self) -> None:
        """End after the step that is under way."""
        self._is_requested = True

    def is_requested(self) -> bool:
        """Return whether this rank was asked. It may be called from any thread."""
        return self._is_requested

    def has_agreed(self) -> bool:
        """Return whether any rank was asked. All ranks call it together."""
        requests = torch.tensor([int(self._is_requested)])
        dist.all_reduce(requests, op=dist.ReduceOp.MAX, group=self._group)
        return bool(requests.item())
