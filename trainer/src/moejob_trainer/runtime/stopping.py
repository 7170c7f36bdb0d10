"""A run that is asked to end does so after a step, on all ranks alike."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist


class AgreedStop:
    """SIGTERM asks; the ranks agree, for one that stopped alone would leave the others waiting."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_asked = False

    def listen(self) -> None:
        """Take SIGTERM of this process."""
        signal.signal(signal.SIGTERM, lambda *_: self.ask())

    def ask(self) -> None:
        """End after the step that is under way."""
        self._is_asked = True

    def agreed(self) -> bool:
        """Return whether any rank was asked. All ranks call it together."""
        asked = torch.tensor([int(self._is_asked)])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        return bool(asked.item())
