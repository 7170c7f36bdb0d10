"""Rules for the engines of GRPO: on the trainer's GPUs or on their own."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.arithmetic import divisors
from moejob_api.job import Spec
from moejob_api.job.grpo import Grpo, RolloutPlacement
from moejob_api.job.resources import Accelerator
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import Experts, Family, GroupedAttention, LatentAttention, LinearAttention, ModelShape
from moejob_api.models.trainable import CPU_ENGINE_COLUMNS, CPU_ENGINE_HEADS, CPU_ENGINE_LATENT
from moejob_api.problems import Problem, Rule


def rollout_problems(spec: Spec, layout: Layout, shape: ModelShape | None) -> Iterator[Problem]:
    """Every way in which the engines do not fit their GPUs or their model."""
    if spec.grpo is None:
        return
    yield from _node_problems(spec, spec.grpo, layout)
    if shape is not None:
        yield from _model_problems(spec.grpo, shape)
        if spec.resources.accelerator is Accelerator.CPU:
            yield from _cpu_problems(spec.grpo, shape)


def _node_problems(spec: Spec, grpo: Grpo, layout: Layout) -> Iterator[Problem]:
    tensor, path = grpo.rollout.tensor, "spec.grpo.rollout.tensor"
    match grpo.rollout.placement:
        case RolloutPlacement.COLOCATED:
            if layout.gpus_per_pod % tensor:
                fitting = max(d for d in divisors(layout.gpus_per_pod) if d <= tensor)
                yield Problem(
                    Rule.ROLLOUT,
                    path,
                    f"engines of {tensor} GPUs do not fill pods of {layout.gpus_per_pod} GPUs; change tensor to "
                    f"{fitting}",
                )
        case RolloutPlacement.SEPARATE:
            if tensor > spec.resources.gpus_per_node:
                yield Problem(
                    Rule.ROLLOUT,
                    path,
                    f"an engine of {tensor} GPUs does not fit on a node of {spec.resources.gpus_per_node}; change "
                    f"tensor to {spec.resources.gpus_per_node} or less",
                )


def can_divide_model(shape: ModelShape, tensor: int) -> bool:
    """Return whether an engine of this many GPUs can divide the model."""
    return all(size % tensor == 0 for size, _ in _divided_sizes(shape))


def _divided_sizes(shape: ModelShape) -> Iterator[tuple[int, str]]:
    """Yield the sizes that an engine divides over its GPUs, and their names."""
    for attention in shape.attention_kinds():
        if isinstance(attention, (GroupedAttention, LatentAttention)):
            yield attention.heads, "attention heads"
    for mlp in shape.mlp_kinds():
        yield mlp.intermediate, "columns of an expert" if isinstance(mlp, Experts) else "feed-forward columns"


def _model_problems(grpo: Grpo, shape: ModelShape) -> Iterator[Problem]:
    tensor = grpo.rollout.tensor
    if any(isinstance(attention, LinearAttention) for attention in shape.attention_kinds()):
        # vLLM's build for CPUs computes it in bfloat16 alone, and packs its convolution once, at the start.
        yield Problem(
            Rule.ROLLOUT,
            "spec.model.source",
            f"no engine was seen to take new weights of {shape.family}'s linear attention; use method SFT, or another "
            "model",
        )
    for size, what in _divided_sizes(shape):
        if size % tensor:
            fitting = max(d for d in divisors(size) if d <= tensor)
            yield Problem(
                Rule.ROLLOUT,
                "spec.grpo.rollout.tensor",
                f"an engine of {tensor} GPUs cannot divide the model's {size} {what}; change tensor to {fitting}",
            )


def _cpu_problems(grpo: Grpo, shape: ModelShape) -> Iterator[Problem]:
    """Refuse sizes that vLLM's kernels for CPUs do not take: its engines would end at their start."""
    for refusal in _cpu_refusals(grpo, shape):
        yield Problem(Rule.ROLLOUT, "spec.resources.accelerator", f"{refusal}; use GPUs, or another model")


def _cpu_refusals(grpo: Grpo, shape: ModelShape) -> Iterator[str]:
    columns, experts = CPU_ENGINE_COLUMNS, shape.experts
    for attention in shape.attention_kinds():
        if (
            isinstance(attention, LatentAttention)
            and attention.key_value_rank + attention.rope_dim != CPU_ENGINE_LATENT
        ):
            yield (
                f"engines on CPUs take latent attention that keeps {CPU_ENGINE_LATENT} numbers of a token, and the "
                f"model's keeps {attention.key_value_rank} + {attention.rope_dim}"
            )
        if isinstance(attention, GroupedAttention) and attention.head_dim not in CPU_ENGINE_HEADS:
            sizes = ", ".join(map(str, CPU_ENGINE_HEADS))
            yield f"engines on CPUs take attention heads of {sizes} numbers, and the model's have {attention.head_dim}"
    if experts is not None and shape.hidden % columns:
        yield f"engines on CPUs take experts of a hidden size that {columns} divides, and the model's is {shape.hidden}"
    if shape.family is Family.MINIMAX_M2:
        # Seen with vLLM 0.32: an assertion at the first token.
        yield f"engines on CPUs take sigmoid scores of grouped experts only, and {shape.family} has no groups"
    # Of other families vLLM fills up what is missing.
    if experts is not None and shape.family is Family.GPT_OSS and experts.intermediate // grpo.rollout.tensor % columns:
        yield (
            f"engines on CPUs take experts of {shape.family} whose columns {columns} divides, and the model's have "
            f"{experts.intermediate} by a tensor of {grpo.rollout.tensor}"
        )
