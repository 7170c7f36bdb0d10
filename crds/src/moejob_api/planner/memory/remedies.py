"""Settings that would make a job fit: each alone, cheapest first, or else a few together.

Layouts are not touched here; moejob_api.planner.suggestions and moejob_api.planner.search change those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations, islice, product

from moejob_api.arithmetic import divisors
from moejob_api.hardware import memory_limit_bytes
from moejob_api.job import Spec
from moejob_api.job.base import Dtype
from moejob_api.job.grpo import Grpo, RolloutPlacement
from moejob_api.job.moe import Sharding
from moejob_api.job.training import Recompute, RecomputeGranularity
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.engine import estimate_engine, estimate_engine_among
from moejob_api.planner.memory.estimate import estimate_memory
from moejob_api.planner.memory.phases import MemoryPhase
from moejob_api.rules import layout_problems
from moejob_api.rules.rollout_rules import can_divide_model

# The least that grpo.rollout.gpuMemoryUtilization accepts.
SMALLEST_ENGINE_PERCENT = 5
# The rest of a GPU's memory is that of its driver and libraries.
LARGEST_ENGINE_PERCENT = 95
# Each takes an estimate; a spec that comes from a stranger must be refused in milliseconds too.
COMBINATIONS_TRIED = 30


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting and its new value, as a person writes them."""

    path: str
    value: str

    def __str__(self) -> str:
        return f"{self.path}: {self.value}"


@dataclass(frozen=True, slots=True)
class _RemedyOption:
    """A change that could be made: where, the new value read from the changed spec, and how. Options of one topic
    exclude each other."""

    topic: str
    path: str
    value: Callable[[Spec], object]
    apply: Callable[[Spec], Spec]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Changes that together make the job fit, and the bytes it takes then."""

    changes: tuple[SettingChange, ...]
    bytes: int
    spec: Spec
    options: tuple[_RemedyOption, ...] = ()

    def __str__(self) -> str:
        return ", ".join(str(change) for change in self.changes)


def find_remedies(spec: Spec, shape: ModelShape, layout: Layout, limit_bytes: int) -> tuple[Remedy, ...]:
    """Return every single change that makes the job fit, or else a small combination that does, or nothing.

    Engines that leave the trainer's GPUs take GPUs of their own, so this change is tried last.
    """
    remedies = _find_setting_remedies(spec, shape, layout, limit_bytes)
    if remedies or spec.grpo is None or spec.grpo.rollout.placement is RolloutPlacement.SEPARATE:
        return remedies
    moved = _rollout_option("placement", "placement", {"placement": RolloutPlacement.SEPARATE})
    if (alone := _try_options(spec, shape, layout, limit_bytes, (moved,))) is not None:
        return (alone,)
    if set(layout_problems(moved.apply(spec), shape)) - set(layout_problems(spec, shape)):
        return ()
    change = SettingChange(moved.path, RolloutPlacement.SEPARATE)
    further = _find_setting_remedies(moved.apply(spec), shape, layout, limit_bytes)
    return tuple(replace(remedy, changes=(change, *remedy.changes)) for remedy in further)


def _find_setting_remedies(spec: Spec, shape: ModelShape, layout: Layout, limit_bytes: int) -> tuple[Remedy, ...]:
    options = tuple(_remedy_options(spec, shape, layout, limit_bytes))
    try_options = partial(_try_options, spec, shape, layout, limit_bytes)
    if single_changes := tuple(_iterate_fitting(try_options, ((option,) for option in options))):
        return single_changes
    # Where everything together is not enough, no part of it is: most refused jobs end here.
    everything = next(_iterate_fitting(try_options, product(*_options_by_topic(spec, shape, options))), None)
    if everything is None:
        return ()
    smaller = (
        chosen
        for size in range(2, len(options))
        for chosen in combinations(options, size)
        if len({option.topic for option in chosen}) == size
    )
    few = next(_iterate_fitting(try_options, islice(smaller, COMBINATIONS_TRIED)), None)
    return (few if few is not None else _drop_needless(try_options, everything),)


def _drop_needless(try_options: Callable[[tuple[_RemedyOption, ...]], Remedy | None], remedy: Remedy) -> Remedy:
    """Leave out what the rest can do without, the dearest first."""
    for option in reversed(remedy.options):
        fewer = try_options(tuple(other for other in remedy.options if other is not option))
        remedy = remedy if fewer is None else fewer
    return remedy


def _iterate_fitting(
    try_options: Callable[[tuple[_RemedyOption, ...]], Remedy | None], choices: Iterable[tuple[_RemedyOption, ...]]
) -> Iterator[Remedy]:
    return (remedy for chosen in choices if (remedy := try_options(chosen)) is not None)


def _options_by_topic(spec: Spec, shape: ModelShape, options: tuple[_RemedyOption, ...]) -> list[list[_RemedyOption]]:
    """Return the options that break no rule by themselves, those that exclude each other together."""
    known_problems, topics = set(layout_problems(spec, shape)), dict[str, list[_RemedyOption]]()
    for option in options:
        if not set(layout_problems(option.apply(spec), shape)) - known_problems:
            topics.setdefault(option.topic, []).append(option)
    return list(topics.values())


def _try_options(
    spec: Spec, shape: ModelShape, layout: Layout, limit_bytes: int, chosen: tuple[_RemedyOption, ...]
) -> Remedy | None:
    changed = reduce(lambda result, option: option.apply(result), chosen, spec)
    needed = estimate_memory(changed, shape, layout)
    if not needed.is_within(limit_bytes):
        return None
    # A remedy must not break a rule that the job kept.
    if set(layout_problems(changed, shape)) - set(layout_problems(spec, shape)):
        return None
    changes = tuple(SettingChange(option.path, _yaml_text(option.value(changed))) for option in chosen)
    return Remedy(changes, needed.bytes, changed, chosen)


def _yaml_text(value: object) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _remedy_options(spec: Spec, shape: ModelShape, layout: Layout, limit_bytes: int) -> Iterator[_RemedyOption]:
    """Changes from cheap to dear: in speed first, in exactness second."""
    yield from _batch_options(spec)
    yield from _recomputation_options(spec)
    yield from _precision_options(spec)
    yield from _sharding_options(spec, layout)
    if spec.memory.offload_optimizer < 1:
        yield _memory_option("offload", "offloadOptimizer", {"offload_optimizer": 1.0})
    yield from _generation_options(spec, shape, layout, limit_bytes)


def _batch_options(spec: Spec) -> Iterator[_RemedyOption]:
    training, shortest = spec.training, spec.data.max_length
    if training.dynamic_batch_tokens is not None and training.dynamic_batch_tokens > shortest:
        yield _training_option("batch", "dynamicBatchTokens", {"dynamic_batch_tokens": shortest})
    if training.micro_batch_size > 1:
        yield _training_option("batch", "microBatchSize", {"micro_batch_size": 1})


def _recomputation_options(spec: Spec) -> Iterator[_RemedyOption]:
    granularity = spec.training.recompute.granularity
    if spec.memory.offload_activations or granularity is RecomputeGranularity.FULL:
        return
    for stronger in (RecomputeGranularity.SELECTIVE, RecomputeGranularity.FULL):
        if granularity is not stronger:
            changed = _training_option("recompute", "recompute", {"recompute": Recompute(granularity=stronger)})
            yield replace(
                changed,
                path="training.recompute.granularity",
                value=lambda job: job.training.recompute.granularity,
            )


def _precision_options(spec: Spec) -> Iterator[_RemedyOption]:
    precision = spec.training.precision
    if precision.compute is not None:
        yield _precision_option("compute", None)
    fields = {"moments": precision.moments}
    if spec.model.dtype is not Dtype.FLOAT32:
        fields["gradients"] = precision.gradients
    for name, kind in fields.items():
        if kind is Dtype.FLOAT32:
            yield _precision_option(name, Dtype.BFLOAT16)


def _precision_option(name: str, value: Dtype | None) -> _RemedyOption:
    return _RemedyOption(name, f"training.precision.{name}", lambda _: value, partial(_with_precision, {name: value}))


def _with_precision(update: Mapping[str, Dtype | None], spec: Spec) -> Spec:
    precision = spec.training.precision.model_copy(update=update)
    return spec.model_copy(update={"training": spec.training.model_copy(update={"precision": precision})})


def _sharding_options(spec: Spec, layout: Layout) -> Iterator[_RemedyOption]:
    if spec.memory.sharding is Sharding.DISTRIBUTED_OPTIMIZER and layout.data * layout.context > 1:
        yield _memory_option("offload", "sharding", {"sharding": Sharding.FSDP})


def _generation_options(spec: Spec, shape: ModelShape, layout: Layout, limit_bytes: int) -> Iterator[_RemedyOption]:
    if spec.grpo is None:
        return
    is_colocated = spec.grpo.rollout.placement is RolloutPlacement.COLOCATED
    if is_colocated and not spec.memory.offload_gradients:
        yield _memory_option("gradients away", "offloadGradients", {"offload_gradients": True})
    if is_colocated and not spec.memory.offload_parameters:
        yield _memory_option("parameters away", "offloadParameters", {"offload_parameters": True})
    for tensor in _larger_tensors(spec, spec.grpo, shape, layout):
        yield _rollout_option("engine size", "tensor", {"tensor": tensor})
    # Last: what the engine may take depends on what the others leave.
    yield _RemedyOption(
        "engine",
        "grpo.rollout.gpuMemoryUtilization",
        lambda job: job.grpo.rollout.gpu_memory_utilization if job.grpo else None,
        partial(_with_fitting_engine, shape, layout, limit_bytes),
    )


def _larger_tensors(spec: Spec, grpo: Grpo, shape: ModelShape, layout: Layout) -> list[int]:
    """The two smallest sizes of engines that hold the model, where the job's own engines do not."""
    memory = memory_limit_bytes(spec.resources)
    engine = estimate_engine(spec, shape, layout)
    if memory is None or engine is None or engine.can_run:
        return []
    is_colocated = grpo.rollout.placement is RolloutPlacement.COLOCATED
    most = layout.gpus_per_pod if is_colocated else spec.resources.gpus_per_node
    sizes = [tensor for tensor in divisors(most) if tensor > grpo.rollout.tensor and can_divide_model(shape, tensor)]
    return [tensor for tensor in sizes if _least_engine_bytes(spec, grpo, shape, tensor) <= memory][:2]


def _least_engine_bytes(spec: Spec, grpo: Grpo, shape: ModelShape, tensor: int) -> int:
    sized = grpo.model_copy(update={"rollout": grpo.rollout.model_copy(update={"tensor": tensor})})
    return estimate_engine_among(spec, sized, shape, 1).least_bytes


def _with_fitting_engine(shape: ModelShape, layout: Layout, limit_bytes: int, spec: Spec) -> Spec:
    """The engine takes what the trainer leaves during generation, in whole percent."""
    needed, memory = estimate_memory(spec, shape, layout), memory_limit_bytes(spec.resources)
    if spec.grpo is None or needed.engine is None or not memory:
        return spec
    percent = LARGEST_ENGINE_PERCENT
    if spec.grpo.rollout.placement is RolloutPlacement.COLOCATED:
        generation = next(peak.bytes for peak in needed.phases if peak.phase is MemoryPhase.GENERATE)
        percent = min(percent, 100 * (limit_bytes - generation + needed.engine.bytes) // memory)
    is_larger = percent > spec.grpo.rollout.engine_share * 100
    # An engine that runs needs no more, and one with less would not run.
    if percent < SMALLEST_ENGINE_PERCENT or is_larger is needed.engine.can_run:
        return spec
    return _with_rollout({"gpu_memory_utilization": percent / 100}, spec)


def _with_rollout(update: Mapping[str, object], spec: Spec) -> Spec:
    if spec.grpo is None:
        return spec
    rollout = spec.grpo.rollout.model_copy(update=update)
    return spec.model_copy(update={"grpo": spec.grpo.model_copy(update={"rollout": rollout})})


def _rollout_option(topic: str, name: str, update: dict[str, object]) -> _RemedyOption:
    (value,) = update.values()
    return _RemedyOption(topic, f"grpo.rollout.{name}", lambda _: value, partial(_with_rollout, update))


def _training_option(topic: str, name: str, update: dict[str, object]) -> _RemedyOption:
    (field,) = update
    return _RemedyOption(
        topic,
        f"training.{name}",
        lambda job: getattr(job.training, field),
        lambda job: job.model_copy(update={"training": job.training.model_copy(update=update)}),
    )


def _memory_option(topic: str, name: str, update: dict[str, object]) -> _RemedyOption:
    (field,) = update
    return _RemedyOption(
        topic,
        f"memory.{name}",
        lambda job: getattr(job.memory, field),
        lambda job: job.model_copy(update={"memory": job.memory.model_copy(update=update)}),
    )
