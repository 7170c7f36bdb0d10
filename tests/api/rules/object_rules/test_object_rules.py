"""Refusals of one object, in the planner's words. The API server's twin is tested beside the CRD."""

from __future__ import annotations

import pytest

from broken_specs import BROKEN_SPECS, BrokenSpec
from builders import spec
from moejob_api.rules.object_rules import OBJECT_RULES, object_problems


@pytest.mark.parametrize("case", BROKEN_SPECS, ids=lambda case: case.id)
def test_a_broken_spec_is_refused_by_its_rule_alone(case: BrokenSpec) -> None:
    problems = list(object_problems(spec(**case.sections)))
    assert [problem.rule for problem in problems] == [case.rule]
    assert case.says in problems[0].message


def test_every_rule_has_a_spec_that_breaks_it() -> None:
    broken = [
        frozenset(id(rule) for rule in OBJECT_RULES if rule.complaint(spec(**case.sections))) for case in BROKEN_SPECS
    ]
    assert frozenset.union(*broken) == {id(rule) for rule in OBJECT_RULES}


@pytest.mark.parametrize("method", ["SFT", "GRPO"])
def test_a_minimal_spec_breaks_no_rule(method: str) -> None:
    assert list(object_problems(spec(method=method))) == []


def test_a_variable_given_twice_is_refused() -> None:
    twice = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    (problem,) = object_problems(spec(resources={"env": twice}))
    assert problem.message == "variable A is given twice; keep one"
