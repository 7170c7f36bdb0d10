"""Warnings in rank 0's log: routers that collapse, GRPO that learns nothing. Each once in a start of the ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

from moejob_api.job.grpo import Grpo
from moejob_api.learning_signals import WINDOW_STEPS, SignalKind, weak_signals

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoggedRewards:
    """The rewards of a step, by its line."""

    reward: float | None
    groups: float
    flat_groups: float
    cut_share: float


@dataclass(slots=True)
class SignalLog:
    """Looks at each step; without `grpo` there are no rewards to look at."""

    grpo: Grpo | None
    _steps: list[LoggedRewards] = field(init=False, default_factory=list)
    _warned: set[SignalKind] = field(init=False, default_factory=set)
    # Steps in a row with a collapsed layer.
    _collapsed_steps: int = field(init=False, default=0)

    def note_step(self, line: Mapping[str, Any]) -> None:
        """Add the line of a step, and log each kind of warning the first time that it applies."""
        self._note_routers(line)
        if self.grpo is None:
            return
        reward, groups = line.get("reward", nan), line.get("groups", 0)
        flat, cut = line.get("groupsWithoutSignal", 0), line.get("truncated", 0)
        self._steps.append(LoggedRewards(reward, groups, flat, cut))
        # Keep the first steps, with which later ones are compared, and the last ones.
        del self._steps[WINDOW_STEPS:-WINDOW_STEPS]
        for signal in weak_signals(self._steps, self.grpo):
            if signal.kind not in self._warned:
                self._warned.add(signal.kind)
                log.warning("%s", signal.message)

    def _note_routers(self, line: Mapping[str, Any]) -> None:
        collapsed_layers = line.get("collapsedLayers", 0)
        self._collapsed_steps = self._collapsed_steps + 1 if collapsed_layers else 0
        if self._collapsed_steps == WINDOW_STEPS:
            log.warning(
                "in %d layers nearly all tokens have chosen the same experts for %d steps: the router has collapsed; "
                "turn moe.balancing on, raise its coefficient, or lower the learning rate",
                collapsed_layers,
                WINDOW_STEPS,
            )
