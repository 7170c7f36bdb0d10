"""The groups that may be asked for, and those of them that a step may take. Pure: numbers in, decisions out.

Version v of the weights is published when v steps are done. A group that is asked for at version v may be trained on up
to step v + N, its deadline, with N = `rollout.staleness`: no token is then older than N versions. Each step takes P
groups (`promptsPerStep`). So of the groups that no step has taken, those with deadlines up to step t must fit into the
steps up to t. With r groups that the present step s still takes, this is, for each t from s to s + N,

    groups with deadline <= t   <=   r + (t - s) P

A new group has the latest deadline, s + N, so it may be asked for while all groups are fewer than r + N P. A step takes
the oldest complete group whose removal keeps the inequality for r - 1: where it is an equality for some t, one with a
deadline up to that t. Where no such group is complete, a step waits.

With N = 2, P = 2 and a group 0 that takes very long. Step 0 asks for groups 0 to 5, whose deadline is 2, and takes 1
and 2. Step 1 asks for 6 and 7, with deadline 3, and takes 3 and 4: four groups are due by step 2, and 2 + 2 places are
left until then, so 6 and 7 have to wait. Step 2 asks for 8 and 9, and takes 5; now group 0 is due and one place is
left, so the step waits for group 0, although 6 to 9 are complete. With N = 1 a step takes, as a rule, the groups that
the step before it has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The settings that decide: versions that a token may be old, groups of a step, and most prompts of a step."""

    staleness: int
    groups: int
    # With dynamic sampling a step asks for more prompts than it takes groups.
    most_prompts: int


class PendingGroup(Protocol):
    """A group that was asked for and that no step has taken."""

    @property
    def number(self) -> int:
        """Return the number of its prompt."""

    @property
    def version(self) -> int:
        """Return the version of the weights when it was asked for."""

    @property
    def is_complete(self) -> bool:
        """Return whether it has all answers and rewards."""


Pending = TypeVar("Pending", bound=PendingGroup)


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """The present step, the groups that it has chosen, and all groups that it has taken, also those it leaves out."""

    step: int
    chosen: int = 0
    taken: int = 0

    def open_places(self, limits: AdmissionLimits) -> int:
        """Return the groups that the step still takes, if each of them is chosen."""
        return min(limits.groups - self.chosen, limits.most_prompts - self.taken)

    def take_place(self, *, is_chosen: bool) -> StepPlaces:
        """Return the places after one more group."""
        return StepPlaces(self.step, self.chosen + is_chosen, self.taken + 1)


def askable_groups(limits: AdmissionLimits, places: StepPlaces, pending_count: int) -> int:
    """Return how many groups may be asked for now."""
    return max(0, places.open_places(limits) + limits.staleness * limits.groups - pending_count)


def urgent_deadline(limits: AdmissionLimits, places: StepPlaces, pending: Sequence[PendingGroup]) -> int | None:
    """Return the earliest step whose due groups fill all places up to it; None where places are to spare.

    Then the next group that the present step takes has to be one of these.
    """
    for step in range(places.step, places.step + limits.staleness + 1):
        if _due_count(limits, pending, step) >= _place_count(limits, places, step):
            return step
    return None


def takeable_group(limits: AdmissionLimits, places: StepPlaces, pending: Sequence[Pending]) -> Pending | None:
    """Return the oldest complete group that the step may take, None where it waits for another one."""
    if places.open_places(limits) <= 0:
        return None
    complete_groups = (group for group in _next_groups(limits, places, pending) if group.is_complete)
    return min(complete_groups, key=lambda group: group.number, default=None)


def awaited_groups(limits: AdmissionLimits, places: StepPlaces, pending: Sequence[Pending]) -> tuple[Pending, ...]:
    """Return the unfinished groups of which the step has to take one next; none while it can take another group."""
    if places.open_places(limits) <= 0 or takeable_group(limits, places, pending) is not None:
        return ()
    return tuple(_next_groups(limits, places, pending))


def _next_groups(limits: AdmissionLimits, places: StepPlaces, pending: Sequence[Pending]) -> Sequence[Pending]:
    deadline = urgent_deadline(limits, places, pending)
    if deadline is None:
        return pending
    return [group for group in pending if group.version + limits.staleness <= deadline]


def _due_count(limits: AdmissionLimits, pending: Sequence[PendingGroup], step: int) -> int:
    return sum(group.version + limits.staleness <= step for group in pending)


def _place_count(limits: AdmissionLimits, places: StepPlaces, step: int) -> int:
    return places.open_places(limits) + (step - places.step) * limits.groups


def split_feasible(
    limits: AdmissionLimits, places: StepPlaces, finished: Sequence[Pending]
) -> tuple[list[Pending], list[Pending]]:
    """Return the finished groups of a resumed run that are still in time, oldest first, and those to be asked again.

    All are in time unless the job was resumed with other settings.
    """
    kept: list[Pending] = []
    outdated: list[Pending] = []
    for group in sorted(finished, key=lambda group: group.number):
        is_in_time = group.version + limits.staleness >= places.step
        (kept if is_in_time and _fits_places(limits, places, [*kept, group]) else outdated).append(group)
    return kept, outdated


def _fits_places(limits: AdmissionLimits, places: StepPlaces, pending: Sequence[PendingGroup]) -> bool:
    return all(
        _due_count(limits, pending, step) <= _place_count(limits, places, step)
        for step in range(places.step, places.step + limits.staleness + 1)
    )
