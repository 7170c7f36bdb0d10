"""Signs that a GRPO run learns nothing, found in the numbers of its last steps, each with what to change.

An update is made of the differences between the rewards of a group. If all answers have the same reward, there is no
difference; if most answers are cut off, the reward sees half an answer. Then the run makes its steps, and the model
stays as it was. `moejob run` shows these signs, rank 0 logs and reports them, and the operator makes them a condition.
Knows neither files nor screens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isnan
from statistics import fmean
from typing import Protocol

from moejob_api.job.grpo import Grpo

# Single steps vary: with 4 groups a step and a signal in every other group, one step in 16 has no signal. 5 steps have
# 20 groups, and in one run of a thousand fewer than a fifth of these have a signal.
WINDOW_STEPS = 5
# From here on half of what engines generate, and more, teaches nothing: the same update would cost half as much with
# other prompts. Replacing such groups (dynamicSampling) asks for twice as many answers.
MOST_FLAT = 0.5
# Most answers have no end. With an answer in two cut off the rest still shows the model what an end is worth.
MOST_CUT = 0.5
# Measures of a run's progress: the number of signs once it is known, and one measure for each of them.
# Measures, not a field: an operator of another version refuses a report with a field that it does not know.
_COUNT, _SIGN = "weakSignals", "weakSignal/"


class StepRewards(Protocol):
    """The rewards of a step, as its line in the log has them."""

    @property
    def reward(self) -> float | None:
        """The mean; None where the step had none."""

    @property
    def groups(self) -> float:
        """Groups that were learned from."""

    @property
    def flat_groups(self) -> float:
        """Groups whose answers have equal rewards."""

    @property
    def cut_share(self) -> float:
        """The share of answers without an end."""


class SignalKind(StrEnum):
    """A sign that little is learned."""

    FLAT = "flat"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class LearningSignal:
    """A sign, and the sentence that says it with its numbers and the fix."""

    kind: SignalKind
    message: str


def weak_signals(lines: Sequence[StepRewards], grpo: Grpo) -> list[LearningSignal]:
    """Return the signs in the last steps; none before there are enough of them."""
    recent = lines[-WINDOW_STEPS:]
    if len(recent) < WINDOW_STEPS or any(line.reward is None for line in recent):
        return []
    signals = [_flat_signal(lines, recent, grpo), _cut_signal(recent, grpo)]
    return [signal for signal in signals if signal is not None]


def signal_measures(kinds: Collection[SignalKind] | None) -> dict[str, float]:
    """Return the measures that report signs; none before it is known whether there are any."""
    if kinds is None:
        return {}
    return {_COUNT: float(len(kinds))} | {f"{_SIGN}{kind}": 1.0 for kind in SignalKind if kind in kinds}


def reported_signals(measures: Mapping[str, float]) -> tuple[SignalKind, ...] | None:
    """Return the signs of a report; None when it says nothing of them."""
    if _COUNT not in measures:
        return None
    return tuple(kind for kind in SignalKind if f"{_SIGN}{kind}" in measures)


def signals_text(kinds: Collection[SignalKind]) -> str:
    """Return the sentence about signs. It has no number that changes while its meaning stays."""
    words = {
        SignalKind.FLAT: "at least half of the groups have answers of one and the same reward",
        SignalKind.CUT: "at least half of the answers were cut off at grpo.maxNewTokens",
    }
    signs = " and ".join(text for kind, text in words.items() if kind in kinds)
    return f"little is learned: in {WINDOW_STEPS} steps {signs}"


def signal_words(line: StepRewards) -> list[str]:
    """Return what one step shows of it, for the line of a display."""
    words = []
    if line.groups and line.flat_groups / line.groups >= MOST_FLAT:
        words.append(f"{line.flat_groups:.0f} of {line.groups:.0f} groups of equal reward")
    if line.cut_share >= MOST_CUT:
        words.append(f"{line.cut_share:.0%} cut off")
    return words


def _flat_signal(lines: Sequence[StepRewards], recent: Sequence[StepRewards], grpo: Grpo) -> LearningSignal | None:
    mean = fmean(line.reward or 0.0 for line in recent)
    flat, groups = sum(line.flat_groups for line in recent), sum(line.groups for line in recent)
    if not groups or flat / groups < MOST_FLAT or _has_risen(lines):
        return None
    larger = 2 * grpo.group_size
    replaced = "" if grpo.dynamic_sampling else ", and grpo.dynamicSampling replaces such groups"
    message = (
        f"{flat:.0f} of {groups:.0f} groups of the last {len(recent)} steps have answers of one and the same reward "
        f"(mean {mean:.4g}), from which nothing is learned; take prompts that the model gets right now and then, not "
        "never or always, or a reward that gives a part of the points; "
        f"grpo.groupSize {larger} sees more differences{replaced}"
    )
    return LearningSignal(SignalKind.FLAT, message)


def _has_risen(lines: Sequence[StepRewards]) -> bool:
    """Return whether the reward is above the first steps' reward: then groups are equal because answers are right."""
    first, last = lines[:WINDOW_STEPS], lines[-WINDOW_STEPS:]
    return fmean(line.reward or 0.0 for line in last) > fmean(line.reward or 0.0 for line in first)


def _cut_signal(recent: Sequence[StepRewards], grpo: Grpo) -> LearningSignal | None:
    share = fmean(line.cut_share for line in recent)
    # A step without any answer left has no share.
    if isnan(share) or share < MOST_CUT:
        return None
    message = (
        f"{share:.0%} of the answers of the last {len(recent)} steps were cut off at grpo.maxNewTokens "
        f"{grpo.max_new_tokens}, before they came to an end; raise it, ask for shorter answers in the prompt, or look "
        "into samples/ whether the model ever writes its end token"
    )
    return LearningSignal(SignalKind.CUT, message)
