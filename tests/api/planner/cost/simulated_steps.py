"""One engine and a trainer, answer by answer: what the formulas for staleness are compared with.

Groups are asked and taken as docs/grpo.md says: pending and chosen groups are at most (N + 1) P, a step takes complete
groups, oldest first, while every group that is left can still be taken before it is too old.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setting:
    """A job as the simulation knows it; seconds(n) is one token of each of n answers."""

    staleness: int
    prompts: int
    group_size: int
    longest: int
    places: int
    learning: float
    sync: float
    seconds: Callable[[float], float]
    reading: float = 0.0
    colocated: bool = False


@dataclass
class Group:
    number: int
    deadline: int
    unfinished: int


@dataclass
class Answer:
    group: Group
    tokens: float


@dataclass
class Simulation:
    setting: Setting
    draw: random.Random = field(default_factory=lambda: random.Random(3))
    now: float = 0.0
    version: int = 0
    asked: int = 0
    chosen: int = 0
    pending: list[Group] = field(default_factory=list)
    queue: list[Answer] = field(default_factory=list)
    running: list[Answer] = field(default_factory=list)

    def step_seconds(self, steps: int = 12, warm_up: int = 6) -> float:
        """Return the mean seconds of a step, without the first ones."""
        ends = []
        for _ in range(warm_up + steps):
            self.run_step()
            ends.append(self.now)
        return (ends[-1] - ends[warm_up - 1]) / steps

    def run_step(self) -> None:
        """Publish, collect, learn."""
        setting = self.setting
        self.now += setting.sync + (setting.reading if setting.staleness else 0.0)
        self.admit()
        while self.chosen < setting.prompts:
            if not self.take():
                self.generate(float("inf"))
        if setting.colocated or setting.staleness == 0:
            self.now += setting.learning
        else:
            end = self.now + setting.learning
            while self.now < end:
                self.generate(end)
        self.chosen, self.version = 0, self.version + 1

    def admit(self) -> None:
        """Ask for groups as long as the inequality allows."""
        setting = self.setting
        while len(self.pending) + self.chosen < (setting.staleness + 1) * setting.prompts:
            group = Group(self.asked, self.version + setting.staleness, setting.group_size)
            self.asked += 1
            self.pending.append(group)
            self.queue += [Answer(group, length) for length in self.lengths()]
        free = setting.places - len(self.running)
        self.running += self.queue[:free]
        del self.queue[:free]

    def lengths(self) -> Iterator[int]:
        """A third of the longest on average, without the limit."""
        for _ in range(self.setting.group_size):
            yield max(1, min(self.setting.longest, round(self.draw.expovariate(3 / self.setting.longest))))

    def take(self) -> bool:
        """Take the oldest complete group that may be taken; admission is checked again at once."""
        for group in self.pending:
            if group.unfinished == 0 and self.is_feasible_without(group):
                self.pending.remove(group)
                self.chosen += 1
                self.admit()
                return True
        return False

    def is_feasible_without(self, group: Group) -> bool:
        rest = [other for other in self.pending if other is not group]
        places = self.setting.prompts - self.chosen - 1
        return all(
            sum(other.deadline <= step for other in rest) <= places + (step - self.version) * self.setting.prompts
            for step in range(self.version, self.version + self.setting.staleness + 1)
        )

    def generate(self, end: float) -> None:
        """Until the next answer is complete, or until `end`."""
        if not self.running:
            self.now = end
            return
        seconds = self.setting.seconds(len(self.running))
        tokens = min(answer.tokens for answer in self.running)
        tokens = min(tokens, (end - self.now) / seconds)
        self.now += tokens * seconds
        for answer in self.running:
            answer.tokens -= tokens
        for answer in [answer for answer in self.running if answer.tokens < 1e-9]:
            answer.group.unfinished -= 1
            self.running.remove(answer)
        self.now = max(self.now, end) if self.now > end - 1e-9 else self.now
        self.admit()
