"""Checkpoints and the volume that they are on."""

from __future__ import annotations

from moejob_api.job import Spec
from moejob_api.job.storage import ResumeMode
from moejob_api.problems import Rule
from moejob_api.rules.object_rules.object_rule import Complaint, ObjectRule


def _one_checkpoint_rhythm(spec: Spec) -> Complaint:
    if spec.checkpoint.every_steps is None or spec.checkpoint.every_minutes is None:
        return None
    return "everySteps and everyMinutes are both given; keep one"


def _run_to_continue(spec: Spec) -> Complaint:
    if spec.checkpoint.resume is ResumeMode.WEIGHTS or spec.checkpoint.resume_from is not None:
        return None
    return "resume Run continues another job's run, and resumeFrom names none; name it, or leave out resume"


def _one_volume(spec: Spec) -> Complaint:
    if (spec.storage.claim_name is None) != (spec.storage.size is None):
        return None
    number_given = "neither" if spec.storage.size is None else "both"
    return f"exactly one of claimName (an existing claim) and size (a new one) is needed, {number_given} is given"


STORAGE_RULES: tuple[ObjectRule, ...] = (
    ObjectRule(
        Rule.EXACTLY_ONE,
        "spec.checkpoint",
        _one_checkpoint_rhythm,
        "!(has(self.everySteps) && has(self.everyMinutes))",
        "at most one of everySteps and everyMinutes is given",
        on="spec.checkpoint",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.checkpoint.resume",
        _run_to_continue,
        # The section's own default is judged before its fields have theirs.
        "!has(self.resume) || self.resume == 'Weights' || has(self.resumeFrom)",
        "resume Run needs resumeFrom",
        on="spec.checkpoint",
    ),
    ObjectRule(
        Rule.EXACTLY_ONE,
        "spec.storage",
        _one_volume,
        "has(self.claimName) != has(self.size)",
        "exactly one of claimName and size is needed",
        on="spec.storage",
    ),
)
