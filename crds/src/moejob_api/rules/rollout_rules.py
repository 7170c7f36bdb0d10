"""Rules for the engines of GRPO: on the trainer's GPUs or on their own."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.arithmetic import divisors
from moejob_api.job import Spec
from moejob_api.job.grpo import Grpo, Placement
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import Experts, GroupedAttention, LatentAttention, ModelShape
from moejob_api.problems import Problem, Rule


def rollout_problems(spec: Spec, layout: Layout, shape: ModelShape | None) -> Iterator[Problem]:
    """Every way in which the engines do not fit their GPUs or their model."""
    if spec.grpo is None:
        return
    yield from _node_problems(spec, spec.grpo, layout)
    if shape is not None:
        yield from _model_problems(spec.grpo, shape)


def _node_problems(spec: Spec, grpo: Grpo, layout: Layout) -> Iterator[Problem]:
    tensor, path = grpo.rollout.tensor, "spec.grpo.rollout.tensor"
    match grpo.rollout.placement:
        case Placement.COLOCATED:
            if layout.gpus_per_pod % tensor:
                fitting = max(d for d in divisors(layout.gpus_per_pod) if d <= tensor)
                yield Problem(
                    Rule.ROLLOUT,
                    path,
                    f"engines of {tensor} GPUs do not fill pods of {layout.gpus_per_pod} GPUs; change tensor to "
                    f"{fitting}",
                )
        case Placement.SEPARATE:
            if tensor > spec.resources.gpus_per_node:
                yield Problem(
                    Rule.ROLLOUT,
                    path,
                    f"an engine of {tensor} GPUs does not fit on a node of {spec.resources.gpus_per_node}; change "
                    f"tensor to {spec.resources.gpus_per_node} or less",
                )


def divides_model(shape: ModelShape, tensor: int) -> bool:
    """Return whether an engine of this many GPUs can divide the model."""
    return all(whole % tensor == 0 for whole, _ in _wholes(shape))


def _wholes(shape: ModelShape) -> Iterator[tuple[int, str]]:
    """Yield the sizes that an engine divides over its GPUs, and their names."""
    for attention in shape.attentions():
        if isinstance(attention, (GroupedAttention, LatentAttention)):
            yield attention.heads, "attention heads"
    for mlp in shape.mlps():
        yield mlp.intermediate, "columns of an expert" if isinstance(mlp, Experts) else "feed-forward columns"


def _model_problems(grpo: Grpo, shape: ModelShape) -> Iterator[Problem]:
    tensor = grpo.rollout.tensor
    for whole, what in _wholes(shape):
        if whole % tensor:
            fitting = max(d for d in divisors(whole) if d <= tensor)
            yield Problem(
                Rule.ROLLOUT,
                "spec.grpo.rollout.tensor",
                f"an engine of {tensor} GPUs cannot divide the model's {whole} {what}; change tensor to {fitting}",
            )
