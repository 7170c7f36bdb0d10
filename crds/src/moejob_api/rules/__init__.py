"""The rules a job has to keep. Each is a pure function from the spec (and the model's shape) to problems.

Their order matters only to the reader of the problems: contradictions between the numbers come first, contradictions
between the numbers and the model second.
"""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job import Spec
from moejob_api.layout.sizes import derive_layout
from moejob_api.models.shape import ModelShape
from moejob_api.problems import Problem, Rule
from moejob_api.rules.batch_rules import batch_problems
from moejob_api.rules.evaluation_rules import evaluation_problems
from moejob_api.rules.implementation_rules import implementation_problems
from moejob_api.rules.megatron_checkpoint_rules import megatron_checkpoint_problems
from moejob_api.rules.model_rules import model_problems
from moejob_api.rules.object_rules import object_problems
from moejob_api.rules.rollout_rules import rollout_problems
from moejob_api.rules.source_rules import source_problems

# When one of these is broken there is no layout to say anything else about.
GRID_RULES = frozenset({Rule.GPU_COUNT, Rule.EXPERT_GRID, Rule.EXPERT_TENSOR})


def layout_problems(spec: Spec, shape: ModelShape | None) -> tuple[Problem, ...]:
    """Everything wrong with the job but its memory. A model that cannot be seen is not validated."""
    return tuple(_find_problems(spec, shape))


def _find_problems(spec: Spec, shape: ModelShape | None) -> Iterator[Problem]:
    spec_problems = tuple(object_problems(spec))
    yield from spec_problems
    yield from source_problems(spec)
    yield from evaluation_problems(spec)
    yield from implementation_problems(spec, shape)
    yield from megatron_checkpoint_problems(spec, shape)
    if shape is not None:
        yield from model_problems(spec, shape)
    if any(problem.rule in GRID_RULES for problem in spec_problems):
        return
    sizes = derive_layout(spec.parallelism, spec.resources.gpus_per_node)
    yield from batch_problems(spec, sizes)
    yield from rollout_problems(spec, sizes, shape)
