"""One rule in Python and in CEL, and the words that CEL texts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moejob_api.job import Spec
from moejob_api.problems import Rule

# More than any cluster has; keeps products of sizes far from int64, in which CEL computes.
MAX_GPUS = 1_048_576

IS_GRPO = "self.method == 'GRPO'"
ON_GPU = "self.resources.accelerator == 'GPU'"

# Doubles, because int64 cannot hold every product; below MAX_GPUS they are exact.
GPUS = (
    "double(p.tensor) * double(p.pipeline) * double(p.context) * double(p.data) * "
    "(p.expertLayout == 'Product' ? double(p.expert) : 1.0)"
)

Complaint = str | None


@dataclass(frozen=True, slots=True)
class ObjectRule:
    """One rule: `complaint` is None when it holds, `cel` is true when it holds.

    `on` is the object that is `self` in the CEL twin: the smallest that holds all it reads. `profile_may_heal`: a job
    that breaks the rule may keep it once it is merged with its profile.
    """

    rule: Rule
    path: str
    complaint: Callable[[Spec], Complaint]
    cel: str
    summary: str
    on: str = "spec"
    profile_may_heal: bool = False


def with_gpus(condition: str) -> str:
    """A condition on spec about `p`, the parallelism, and `n`, its GPUs; it holds where they are too many to count."""
    return f"[self.parallelism].all(p, [{GPUS}].all(g, g > {MAX_GPUS}.0 || [int(g)].all(n, {condition})))"
