"""Settings that would make a job fit: each alone, cheapest first, or else a few together.

Layouts are not touched here; moejob_api.planner.suggestions and moejob_api.planner.search change those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations, islice, product

from moejob_api.hardware import memory_limit_bytes
from moejob_api.job import Spec
from moejob_api.job.base import Dtype
from moejob_api.job.grpo import RolloutPlacement
from moejob_api.job.moe import Sharding
from moejob_api.job.training import Recompute, RecomputeGranularity
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.estimate import estimate_memory
from moejob_api.planner.memory.phases import MemoryPhase
from moejob_api.rules import layout_problems

# The least that grpo.rollout.gpuMemoryUtilization accepts.
SMALLEST_ENGINE_PERCENT = 5
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
class Remedy:
    """Changes that together make the job fit, and the bytes it takes then."""

    changes: tuple[SettingChange, ...]
    bytes: int
    spec: Spec

    def __str__(self) -> str:
        return ", ".join(str(change) for change in self.changes)


@dataclass(frozen=True, slots=True)
class _RemedyOption:
    """A change that could be made: where, the new value read from the changed spec, and how. Options of one topic
    exclude each other."""

    topic: str
    path: str
    value: Callable[[Spec], object]
    apply: Callable[[Spec], Spec]


def find_remedies(spec: Spec, shape: ModelShape, layout: Layout, limit_bytes: int) -> tuple[Remedy, ...]:
    """Return every single change that makes the job fit, or else a small combination that does, or nothing."""
    options = tuple(_remedy_options(spec, shape, layout, limit_bytes))
    try_options = partial(_try_options, spec, shape, layout, limit_bytes)
    if single_changes := _fitting_remedies(try_options, ((option,) for option in options)):
        return single_changes
    # Where everything together is not enough, no part of it is: most refused jobs end here.
    everything = _fitting_remedies(try_options, product(*_options_by_topic(spec, shape, options)))[:1]
    if not everything:
        return ()
    smaller = (
        chosen
        for size in range(2, len(options))
        for chosen in combinations(options, size)
        if len({option.topic for option in chosen}) == size
    )
    fitting = (remedy for chosen in islice(smaller, COMBINATIONS_TRIED) if (remedy := try_options(chosen)) is not None)
    return (next(fitting, everything[0]),)


def _fitting_remedies(
    try_options: Callable[[tuple[_RemedyOption, ...]], Remedy | None], choices: Iterable[tuple[_RemedyOption, ...]]
) -> tuple[Remedy, ...]:
    return tuple(remedy for chosen in choices if (remedy := try_options(chosen)) is not None)


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
    return Remedy(changes, needed.bytes, changed)


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
    if spec.grpo is None or spec.grpo.rollout.placement is not RolloutPlacement.COLOCATED:
        return
    if not spec.memory.offload_gradients:
        yield _memory_option("gradients away", "offloadGradients", {"offload_gradients": True})
    if not spec.memory.offload_parameters:
        yield _memory_option("parameters away", "offloadParameters", {"offload_parameters": True})
    # Last: what the engine may take depends on what the others leave.
    yield _RemedyOption(
        "engine",
        "grpo.rollout.gpuMemoryUtilization",
        lambda job: job.grpo.rollout.gpu_memory_utilization if job.grpo else None,
        partial(_with_smaller_engine, shape, layout, limit_bytes),
    )


def _with_smaller_engine(shape: ModelShape, layout: Layout, limit_bytes: int, spec: Spec) -> Spec:
    """The engine takes what the trainer leaves during generation, in whole percent."""
    needed, memory = estimate_memory(spec, shape, layout), memory_limit_bytes(spec.resources)
    if spec.grpo is None or needed.engine is None or not memory:
        return spec
    generation = next(peak.bytes for peak in needed.phases if peak.phase is MemoryPhase.GENERATE)
    percent = 100 * (limit_bytes - generation + needed.engine.bytes) // memory
    engine_share = spec.grpo.rollout.engine_share
    if not SMALLEST_ENGINE_PERCENT <= percent < engine_share * 100:
        return spec
    rollout = spec.grpo.rollout.model_copy(update={"gpu_memory_utilization": percent / 100})
    return spec.model_copy(update={"grpo": spec.grpo.model_copy(update={"rollout": rollout})})


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
