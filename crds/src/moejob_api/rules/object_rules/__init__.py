"""Rules of a job that need no model: every rule once in Python and once in CEL.

The planner says the Python message, which carries the values. The API server evaluates the CEL twin (after
defaulting, in the policy of crd/policy.py) and says the summary. A test runs both on the same jobs through the API
server's own code.
"""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job import Spec
from moejob_api.problems import Problem
from moejob_api.rules.object_rules.grid_rules import GRID_RULES
from moejob_api.rules.object_rules.grpo_rules import GRPO_RULES
from moejob_api.rules.object_rules.memory_rules import MEMORY_RULES
from moejob_api.rules.object_rules.method_rules import METHOD_RULES
from moejob_api.rules.object_rules.object_rule import ObjectRule
from moejob_api.rules.object_rules.resource_rules import RESOURCE_RULES
from moejob_api.rules.object_rules.storage_rules import STORAGE_RULES
from moejob_api.rules.object_rules.training_rules import TRAINING_RULES

# In the order in which a reader meets the sections.
OBJECT_RULES: tuple[ObjectRule, ...] = (
    *METHOD_RULES,
    *TRAINING_RULES,
    *GRPO_RULES,
    *MEMORY_RULES,
    *STORAGE_RULES,
    *RESOURCE_RULES,
    *GRID_RULES,
)


def object_problems(spec: Spec) -> Iterator[Problem]:
    """Every rule of this package that the spec breaks."""
    for rule in OBJECT_RULES:
        message = rule.complaint(spec)
        if message is not None:
            yield Problem(rule.rule, rule.path, message)
