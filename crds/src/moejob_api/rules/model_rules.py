"""Rules of a layout once the model is known: layers, heads, experts and widths have to divide."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.arithmetic import divisors, round_up
from moejob_api.job import Spec
from moejob_api.job.moe import BalancingMethod
from moejob_api.job.training import Lora, LoraTarget, RecomputeGranularity, RecomputeModule
from moejob_api.layout.sizes import expert_tensor_size
from moejob_api.layout.stages import StageSplit, layers_per_stage, pipeline_stages, stage_splits
from moejob_api.models.shape import (
    Attention,
    DenseMLP,
    Experts,
    GroupedAttention,
    LatentAttention,
    LinearAttention,
    ModelShape,
)
from moejob_api.models.trainable import UNADAPTED_EXPERTS
from moejob_api.problems import Problem, Rule


def model_problems(spec: Spec, shape: ModelShape) -> Iterator[Problem]:
    """Every way in which the spec does not suit the model."""
    yield from _layer_problems(spec, shape)
    for attention in shape.attention_kinds():
        yield from _head_problems(spec, attention)
    for mlp in shape.mlp_kinds():
        yield from _width_problems(spec, mlp)
    yield from _expert_problems(spec, shape)
    yield from _routing_problems(spec, shape)
    yield from _recompute_problems(spec, shape)
    if spec.training.lora is not None:
        yield from _lora_problems(spec, shape, spec.training.lora)


def _layer_problems(spec: Spec, shape: ModelShape) -> Iterator[Problem]:
    sizes, layers = spec.parallelism, len(shape.layers)
    if pipeline_stages(sizes, layers) is not None:
        return
    chunks = sizes.virtual_pipeline or 1
    counts = layers_per_stage(sizes, layers)
    if counts is None or chunks == 1:
        extra = sizes.embedding_counts_as_layer + sizes.loss_counts_as_layer
        what = f"{layers} layers" + (f" and {extra} for embedding and loss" if extra else "") + _ends_text(spec)
        problem = f"{what} do not divide over {sizes.pipeline} pipeline stages"
    else:
        problem = (
            f"virtualPipeline {chunks} does not divide stages of {_distinct_counts(counts)} layers into equal chunks"
        )
    yield Problem(
        Rule.LAYERS, "spec.parallelism.pipeline", f"{problem}; {_split_advice(layers, sizes.pipeline, chunks)}"
    )


def _ends_text(spec: Spec) -> str:
    named = (
        ("firstStageLayers", spec.parallelism.first_stage_layers),
        ("lastStageLayers", spec.parallelism.last_stage_layers),
    )
    text = " and ".join(f"{name} {value}" for name, value in named if value is not None)
    return f" with {text}" if text else ""


def _distinct_counts(counts: tuple[int, ...]) -> str:
    return " and ".join(str(count) for count in sorted(set(counts)))


def _split_advice(layers: int, pipeline: int, chunks: int) -> str:
    """The split that works, with as many of the chunks that were asked for as do."""
    for fewer in range(chunks, 0, -1):
        splits = stage_splits(layers, pipeline, fewer)
        if splits:
            chunk_text = "" if fewer == chunks else " and virtualPipeline " + str(fewer)
            return f"set {_split_text(splits[0])}{chunk_text}"
    fitting = [d for d in divisors(layers) if d <= pipeline]
    return f"change pipeline to {fitting[-1]}"


def _split_text(split: StageSplit) -> str:
    if split.first_stage_layers is not None:
        return f"firstStageLayers {split.first_stage_layers} and lastStageLayers {split.last_stage_layers}"
    counted = [
        name
        for name, on in (
            ("embeddingCountsAsLayer", split.embedding_counts_as_layer),
            ("lossCountsAsLayer", split.loss_counts_as_layer),
        )
        if on
    ]
    if not counted:
        return (
            "no firstStageLayers, lastStageLayers, embeddingCountsAsLayer or lossCountsAsLayer: the layers divide "
            "evenly"
        )
    return " and ".join(counted) + " to true"


def _head_problems(spec: Spec, attention: Attention) -> Iterator[Problem]:
    tensor = spec.parallelism.tensor
    match attention:
        case GroupedAttention():
            yield from _division_problems(Rule.HEADS, "tensor", tensor, attention.heads, "attention heads")
            groups = attention.key_value_heads
            if groups % tensor and tensor % groups:
                yield Problem(
                    Rule.KEY_VALUE_HEADS,
                    "spec.parallelism.tensor",
                    f"tensor {tensor} is neither a divisor nor a multiple of the model's {groups} key-value heads; "
                    f"change tensor to {_nearest_divisors(groups, tensor)}",
                )
        case LatentAttention():
            yield from _division_problems(Rule.HEADS, "tensor", tensor, attention.heads, "attention heads")
        case LinearAttention():
            yield from _division_problems(
                Rule.HEADS, "tensor", tensor, attention.key_heads, "linear-attention key heads"
            )
            yield from _division_problems(
                Rule.HEADS, "tensor", tensor, attention.value_heads, "linear-attention value heads"
            )
            if spec.parallelism.context > 1:
                yield Problem(
                    Rule.SEQUENCE_LENGTH,
                    "spec.parallelism.context",
                    f"context {spec.parallelism.context} would cut the sequence, but the model's linear attention "
                    "carries a state along it; change context to 1",
                )


def _width_problems(spec: Spec, mlp: DenseMLP | Experts) -> Iterator[Problem]:
    tensor = spec.parallelism.tensor
    match mlp:
        case DenseMLP():
            yield from _division_problems(Rule.WIDTH, "tensor", tensor, mlp.intermediate, "feed-forward columns")
        case Experts():
            shared = expert_tensor_size(spec.parallelism)
            path = "tensor" if shared == tensor else "expertTensor"
            yield from _division_problems(Rule.WIDTH, path, shared, mlp.intermediate, "columns of an expert")
            if mlp.shared_intermediate:
                yield from _division_problems(
                    Rule.WIDTH, "tensor", tensor, mlp.shared_intermediate, "columns of the shared expert"
                )
            if mlp.bias and shared > 1:
                yield Problem(
                    Rule.EXPERT_TENSOR,
                    f"spec.parallelism.{path}",
                    f"the model's experts have biases, which cannot be split over {shared} GPUs; set expertLayout: "
                    "Folded with expertTensor: 1",
                )


def _expert_problems(spec: Spec, shape: ModelShape) -> Iterator[Problem]:
    size, experts = spec.parallelism.expert, shape.experts
    if experts is None:
        if size > 1:
            yield Problem(
                Rule.EXPERTS,
                "spec.parallelism.expert",
                f"{shape.family} has no experts to spread over expert {size}; set expert to 1 and raise data instead",
            )
        return
    yield from _division_problems(Rule.EXPERTS, "expert", size, experts.count, "experts")


def _routing_problems(spec: Spec, shape: ModelShape) -> Iterator[Problem]:
    experts = shape.experts
    tensor = spec.parallelism.tensor
    if experts is not None and tensor > 1 and spec.parallelism.sequence is False:
        yield Problem(
            Rule.SEQUENCE_PARALLEL,
            "spec.parallelism.sequence",
            f"training experts with tensor {tensor} needs sequence parallelism, or every tensor rank would route the "
            "same tokens; remove sequence: false",
        )
    if experts is None:
        if spec.grpo is not None and spec.grpo.routing_replay:
            yield Problem(
                Rule.ROUTING,
                "spec.grpo.routingReplay",
                f"routingReplay trains on the experts that the engine chose, and {shape.family} has none; remove it",
            )
        return
    if spec.moe.balancing is BalancingMethod.EXPERT_BIAS and not experts.selection_bias:
        yield Problem(
            Rule.ROUTING,
            "spec.moe.balancing",
            f"ExpertBias needs a router with a bias that moves its choice, {shape.family} has none; use AuxLoss or "
            "GlobalAuxLoss",
        )


def _recompute_problems(spec: Spec, shape: ModelShape) -> Iterator[Problem]:
    recompute, path = spec.training.recompute, "spec.training.recompute"
    if recompute.granularity is RecomputeGranularity.SELECTIVE:
        for module in recompute.modules:
            if not _has_module(shape, module):
                yield Problem(
                    Rule.RECOMPUTE,
                    f"{path}.modules",
                    f"{module} is not part of {shape.family}, so recomputing it saves nothing; remove it",
                )
    counts = layers_per_stage(spec.parallelism, len(shape.layers))
    fewest = min(counts) // (spec.parallelism.virtual_pipeline or 1) if counts else 0
    if recompute.layers is not None and counts and recompute.layers > max(fewest, 1):
        yield Problem(
            Rule.RECOMPUTE,
            f"{path}.layers",
            f"layers {recompute.layers} is more than the {fewest} layers of the smallest chunk; lower it to "
            f"{max(fewest, 1)}",
        )


def _has_module(shape: ModelShape, module: RecomputeModule) -> bool:
    match module:
        case RecomputeModule.CORE_ATTENTION | RecomputeModule.NORMS:
            return True
        case RecomputeModule.LATENT_UP_PROJECTION:
            return any(isinstance(attention, LatentAttention) for attention in shape.attention_kinds())
        case RecomputeModule.MLP:
            return any(isinstance(mlp, DenseMLP) for mlp in shape.mlp_kinds())
        case RecomputeModule.EXPERTS | RecomputeModule.EXPERT_INPUT | RecomputeModule.EXPERT_ACTIVATION:
            return shape.experts is not None
        case RecomputeModule.SHARED_EXPERTS:
            return shape.experts is not None and shape.experts.shared_intermediate > 0


def _lora_problems(spec: Spec, shape: ModelShape, lora: Lora) -> Iterator[Problem]:
    of_experts = {LoraTarget.EXPERT_GATE_UP, LoraTarget.EXPERT_DOWN} & set(lora.targets)
    if of_experts and shape.experts is None:
        yield Problem(
            Rule.LORA,
            "spec.training.lora.targets",
            f"{' and '.join(sorted(of_experts))} need experts, {shape.family} has none; use GateUp and Down",
        )
    if of_experts and shape.family in UNADAPTED_EXPERTS:
        yield Problem(
            Rule.LORA,
            "spec.training.lora.targets",
            f"{shape.family} keeps all experts in one tensor, which PEFT has no adapters for; leave out "
            f"{' and '.join(sorted(of_experts))}",
        )
    elif of_experts == {LoraTarget.EXPERT_GATE_UP} and shape.experts is not None:
        # Both are one adapter inside the other to PEFT, which does not find the inner one alone.
        yield Problem(
            Rule.LORA,
            "spec.training.lora.targets",
            "PEFT reads adapters of ExpertGateUp only beside those of ExpertDown; name both",
        )
    # An adapter's inner dimension is divided like the matrix it sits on.
    splits = {"tensor": spec.parallelism.tensor}
    if of_experts:
        splits["expertTensor"] = expert_tensor_size(spec.parallelism)
    for name, size in splits.items():
        if lora.rank % size:
            yield Problem(
                Rule.LORA,
                "spec.training.lora.rank",
                f"rank {lora.rank} does not divide over {name} {size}; change rank to {round_up(lora.rank, size)}",
            )
    if spec.moe.freeze_router is False:
        yield Problem(
            Rule.LORA,
            "spec.moe.freezeRouter",
            "LoRA trains adapters only and freezes the router with everything else; remove freezeRouter: false",
        )


def _division_problems(rule: Rule, name: str, size: int, total: int, what: str) -> Iterator[Problem]:
    if total % size == 0:
        return
    yield Problem(
        rule,
        f"spec.parallelism.{name}",
        f"{name} {size} does not divide the model's {total} {what}; change {name} to {_nearest_divisors(total, size)}",
    )


def _nearest_divisors(total: int, size: int) -> str:
    """The divisors of whole next to size."""
    below = [d for d in divisors(total) if d < size][-1:]
    above = [d for d in divisors(total) if d > size][:1]
    return " or ".join(str(d) for d in (*below, *above))
