"""Warnings in rank 0's log: routers that collapse or recover, GRPO that learns nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

from moejob_api.job.grpo import Grpo
from moejob_api.learning_signals import WINDOW_STEPS, SignalKind, signal_measures, weak_signals
from moejob_api.router_health import collapse_text, layers_text

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
    _count: int = field(init=False, default=0)
    # The step at which each sign was seen last.
    _seen_at: dict[SignalKind, int] = field(init=False, default_factory=dict)

    def note_step(self, line: Mapping[str, Any]) -> Mapping[str, float]:
        """Add the line of a step, and log each kind of warning once in a start of the ranks; return what is reported.

        A sign is reported until it was absent for several steps: one at the border does not come and go.
        """
        if self.grpo is None:
            return {}
        reward, groups = line.get("reward", nan), line.get("groups", 0)
        flat, cut = line.get("groupsWithoutSignal", 0), line.get("truncated", 0)
        self._steps.append(LoggedRewards(reward, groups, flat, cut))
        self._count += 1
        # Keep the first steps, with which later ones are compared, and the last ones.
        del self._steps[WINDOW_STEPS:-WINDOW_STEPS]
        for signal in weak_signals(self._steps, self.grpo):
            self._seen_at[signal.kind] = self._count
            if signal.kind not in self._warned:
                self._warned.add(signal.kind)
                log.warning("%s", signal.message)
        if self._count < WINDOW_STEPS:
            return {}
        return signal_measures([kind for kind, seen in self._seen_at.items() if self._count - seen < WINDOW_STEPS])


@dataclass(slots=True)
class RouterLog:
    """Logs each change of the set of collapsed layers."""

    _layers: tuple[int, ...] = field(init=False, default=())

    def note_layers(self, step: int, layers: tuple[int, ...] | None) -> None:
        """Log the layers that have collapsed or recovered since the last step; None when nothing is known yet."""
        if layers is None or layers == self._layers:
            return
        collapsed, recovered = sorted({*layers} - {*self._layers}), sorted({*self._layers} - {*layers})
        if collapsed:
            log.warning(
                "step %d: %s; turn moe.balancing on, raise its coefficient, or lower the learning rate",
                step,
                collapse_text(collapsed),
            )
        if recovered:
            log.warning("step %d: %s recovered: tokens spread over their experts again", step, layers_text(recovered))
        self._layers = layers
