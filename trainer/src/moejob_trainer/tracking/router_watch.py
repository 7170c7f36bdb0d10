"""A watch over routers: the layers in which few experts do the work of all. Pure.

A layer's load is measured by two numbers: exp(entropy), which is the number of experts that would do the same work if
each had equally much, and the share of experts without a token. A layer collapses and recovers only after several steps
in a row, and recovers at another load than it collapses at, so that one at the border does not come and go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moejob_api.router_health import COLLAPSE_STEPS, COLLAPSED_CHOICES
from moejob_trainer.training import ExpertCounts

# The part of the way from there to an even load that a layer has to go to recover: with 8 of 128, to 21.8.
_RECOVERED_PART = 0.1
_COLLAPSED_IDLE, _RECOVERED_IDLE = 0.5, 0.4
# By chance an expert of an even load of 16 choices gets none in one layer of 9 million.
_FEWEST_CHOICES = 16


@dataclass(slots=True)
class RouterWatch:
    """The state of every layer's router. Before there are enough steps, nothing is known."""

    _steps: int = field(init=False, default=0)
    _collapsed: set[int] = field(init=False, default_factory=set)
    # Steps in a row by which a layer is about to change its state.
    _contrary: dict[int, int] = field(init=False, default_factory=dict)

    @property
    def collapsed_layers(self) -> tuple[int, ...] | None:
        """Return the layers; None before there are enough steps."""
        return None if self._steps < COLLAPSE_STEPS else tuple(sorted(self._collapsed))

    def note_step(self, counts: ExpertCounts) -> None:
        """Add the load of a step."""
        self._steps += 1
        is_collapsed, is_sound = _judge_layers(counts)
        for place, layer in enumerate(counts.layers):
            is_contrary = is_sound[place] if layer in self._collapsed else is_collapsed[place]
            self._contrary[layer] = self._contrary.get(layer, 0) + 1 if is_contrary else 0
            if self._contrary[layer] == COLLAPSE_STEPS:
                self._collapsed ^= {layer}
                self._contrary[layer] = 0


def _judge_layers(counts: ExpertCounts) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return for each layer whether its load is that of a collapsed router, and whether that of a sound one."""
    totals, experts = counts.choices.sum(-1), counts.choices.shape[-1]
    shares = counts.choices / np.maximum(totals, 1)[:, None]
    entropies = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(-1)
    used = np.exp(entropies)
    fewest = COLLAPSED_CHOICES * counts.per_token
    # Of two experts for two choices, all are always used.
    can_collapse = fewest < experts
    idle = (counts.choices == 0).mean(-1) * (totals >= _FEWEST_CHOICES * experts)
    is_collapsed = ((used <= fewest) & can_collapse) | (idle >= _COLLAPSED_IDLE)
    is_spread = (used >= fewest + _RECOVERED_PART * (experts - fewest)) | (not can_collapse)
    return is_collapsed & (totals > 0), is_spread & (idle < _RECOVERED_IDLE)
