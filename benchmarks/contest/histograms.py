"""Histograms as Prometheus shows them: what was observed between two readings."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_BOUND = re.compile(r'le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations at or below each bound, and the sum of all."""

    counts: dict[float, float]
    total: float

    @property
    def count(self) -> float:
        """All observations."""
        return self.counts.get(float("inf"), 0.0)

    @property
    def mean(self) -> float:
        """Of all observations."""
        return self.total / self.count

    def quantile(self, share: float) -> float:
        """As Prometheus estimates it: straight between the two bounds around it."""
        wanted, below, lower = share * self.count, 0.0, 0.0
        for bound, count in sorted(self.counts.items()):
            if count >= wanted:
                return lower if bound == float("inf") else lower + (bound - lower) * (wanted - below) / (count - below)
            below, lower = count, bound
        raise ValueError("a histogram without observations has no quantile")

    def since(self, before: Histogram) -> Histogram:
        """Return what came after an earlier reading."""
        counts = {bound: count - before.counts.get(bound, 0.0) for bound, count in self.counts.items()}
        return Histogram(counts, self.total - before.total)


def histogram(text: str, name: str, label: str) -> Histogram:
    """The samples of a metric that carry a label, written `name="value"`, added up."""
    counts: dict[float, float] = {}
    total = 0.0
    for sample in _SAMPLE.finditer(text):
        if label not in sample["labels"]:
            continue
        if sample["name"] == f"{name}_sum":
            total += float(sample["value"])
        elif sample["name"] == f"{name}_bucket" and (bound := _BOUND.search(sample["labels"])) is not None:
            at = float(bound[1].replace("+Inf", "inf"))
            counts[at] = counts.get(at, 0.0) + float(sample["value"])
    return Histogram(counts, total)
