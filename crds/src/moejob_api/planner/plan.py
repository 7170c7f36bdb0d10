"""The plan of a job: what it takes, why it is refused, what would be accepted instead.

The same function answers `moejob plan`, the admission webhook and the reconciler. It reads nothing: the model's shape
is handed in, or None when the model could not be read. Where changes are looked for, for a job that is refused, is
imported then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from moejob_api.arithmetic import ceil_div
from moejob_api.contract.engines import separate_engines
from moejob_api.contract.pods import PodRole
from moejob_api.derived import RolloutLayout, rollout_layout, update_batch
from moejob_api.hardware import memory_limit_bytes
from moejob_api.job import Spec
from moejob_api.job.resources import Accelerator, QosClass
from moejob_api.layout.sizes import Layout, count_gpus, derive_layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory import MemoryEstimate, VolumeNeed, estimate_memory, volume_need
from moejob_api.planner.memory.case import prepare_case
from moejob_api.planner.memory.estimate import estimate_footprint, host_bytes_of_pod, is_within_host_memory
from moejob_api.planner.pod_resources import PodResources, engine_resources, trainer_resources
from moejob_api.problems import Problem, Rule
from moejob_api.quantities import GIB, quantity_bytes, readable_bytes
from moejob_api.rules import GRID_RULES, layout_problems
from moejob_api.rules.idle_fields import idle_fields
from moejob_api.rules.object_rules.object_rule import MAX_GPUS

if TYPE_CHECKING:
    from moejob_api.planner.suggestions import LayoutFit, Suggestion

# Above this share of idle time a pipeline is worth a word.
NOTABLE_BUBBLE = 0.25
# Tokens of a microbatch below which launching its kernels takes longer than computing them: GRPO of a Qwen3-MoE of six
# layers on an H200 took 33 ms and more for microbatches of 256 tokens, and 25 ms for each 1,000 tokens of large ones.
BUSY_TOKENS = 2048
REMEDIES_NAMED = 3
# A change of parallelism cannot mend these, so looking for one would only take time.
MENDED_ELSEWHERE = frozenset(
    {Rule.METHOD, Rule.EXACTLY_ONE, Rule.CONFLICT, Rule.ENVIRONMENT, Rule.OFFLOAD, Rule.STORAGE, Rule.LORA}
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that follows from a job; accepted when there are no problems."""

    spec: Spec
    shape: ModelShape | None
    layout: Layout | None
    rollout: RolloutLayout | None
    memory: MemoryEstimate | None
    volume: VolumeNeed | None
    limit_bytes: int | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    suggestions: tuple[Suggestion, ...]

    @property
    def is_accepted(self) -> bool:
        """Return whether the plan has no problems."""
        return not self.problems

    @property
    def trainer_pod(self) -> PodResources | None:
        """Return the resources of each trainer pod; None without a layout."""
        return None if self.layout is None else trainer_resources(self.spec, self.layout.gpus_per_pod, self.memory)

    @property
    def engine_pod(self) -> PodResources | None:
        """Return the resources of the pod of each separate engine; None for a job without such pods."""
        if self.rollout is None or not separate_engines(self.spec):
            return None
        return engine_resources(self.spec, self.rollout.tensor, self.memory)

    @property
    def pod_resources(self) -> dict[PodRole, PodResources]:
        """Return the resources of a pod of each role that the job has."""
        pods = {PodRole.TRAINER: self.trainer_pod, PodRole.ROLLOUT: self.engine_pod}
        return {role: pod for role, pod in pods.items() if pod is not None}


def plan_job(
    spec: Spec, shape: ModelShape | None, available_gpus: int | None = None, *, with_suggestions: bool = True
) -> Plan:
    """The plan of a spec for a model of this shape, on exactly `available_gpus` trainer GPUs when given."""
    verdict = _validate_job(spec, shape)
    problems = (*_count_problems(spec, available_gpus), *verdict.problems)
    wanted_gpus = available_gpus or count_gpus(spec.parallelism)
    return Plan(
        spec=spec,
        shape=shape,
        layout=verdict.layout,
        rollout=rollout_layout(spec, verdict.layout) if verdict.layout else None,
        memory=verdict.memory,
        volume=verdict.volume,
        limit_bytes=memory_limit_bytes(spec.resources),
        problems=problems,
        warnings=(*_job_warnings(spec, shape, verdict.layout), *idle_fields(spec, shape)),
        suggestions=_find_suggestions(spec, shape, problems, wanted_gpus) if with_suggestions else (),
    )


@dataclass(frozen=True, slots=True)
class _Verdict:
    problems: tuple[Problem, ...]
    layout: Layout | None
    memory: MemoryEstimate | None
    volume: VolumeNeed | None


def _validate_job(spec: Spec, shape: ModelShape | None) -> _Verdict:
    problems = (*layout_problems(spec, shape), *_limit_problems(spec, shape))
    volume = None if shape is None else volume_need(shape, spec)
    if volume is not None:
        problems += tuple(_storage_problems(spec, volume))
    if any(problem.rule in GRID_RULES for problem in problems):
        return _Verdict(problems, None, None, volume)
    sizes = derive_layout(spec.parallelism, spec.resources.gpus_per_node)
    # An estimate of a layout that cannot be built would only mislead.
    if shape is None or any(problem.path.startswith("spec.parallelism") for problem in problems):
        return _Verdict(problems, sizes, None, volume)
    need = estimate_memory(spec, shape, sizes)
    problems += (
        *_memory_problems(spec, shape, sizes, need),
        *_host_problems(spec, shape, sizes, need),
    )
    return _Verdict(problems, sizes, need, volume)


def _count_problems(spec: Spec, available: int | None) -> Iterator[Problem]:
    needed = count_gpus(spec.parallelism)
    if available is not None and needed != available:
        yield Problem(
            Rule.GPU_COUNT,
            "spec.parallelism",
            f"parallelism takes {needed} GPUs, {available} are there; see the suggestions for layouts on {available}",
        )


def _memory_problems(spec: Spec, shape: ModelShape, sizes: Layout, need: MemoryEstimate) -> Iterator[Problem]:
    limit = memory_limit_bytes(spec.resources)
    if limit is None or need.is_within(limit):
        return
    from moejob_api.planner.memory.remedies import find_remedies

    ways = [
        f"{remedy} ({readable_bytes(remedy.bytes)})"
        for remedy in find_remedies(spec, shape, sizes, limit)[:REMEDIES_NAMED]
    ]
    advice = f"it would fit with {'; or '.join(ways)}" if ways else "no memory setting makes it fit: use more GPUs"
    if need.bytes > limit:
        what = f"a GPU of stage {need.stage} needs {readable_bytes(need.bytes)} during {need.peak.phase}"
        gpu_has = f"{spec.resources.gpu_type} has" if spec.resources.gpu_type else "gpuMemoryGiB says"
        yield Problem(Rule.MEMORY, "spec.parallelism", f"{what}, {gpu_has} {readable_bytes(limit)}; {advice}")
    if need.engine is not None and not need.engine.can_run:
        what = f"an engine of {need.engine.gpus} GPUs needs {readable_bytes(need.engine.least_bytes)} of each"
        yield Problem(
            Rule.MEMORY,
            "spec.grpo.rollout",
            f"{what} for weights and one sequence, gpuMemoryUtilization leaves it "
            f"{readable_bytes(need.engine.reserved or 0)}; {advice}",
        )


def _host_problems(spec: Spec, shape: ModelShape, sizes: Layout, need: MemoryEstimate) -> Iterator[Problem]:
    if spec.resources.memory is None or is_within_host_memory(spec, need):
        return
    needed = host_bytes_of_pod(spec, need)
    waiting = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"asynchronous": False})})
    fits_when_waiting = is_within_host_memory(spec, estimate_memory(waiting, shape, sizes))
    replay = need.replay_bytes_per_pod
    shared_bytes = needed - need.host_bytes_per_pod
    fits_without_replay = needed - replay <= quantity_bytes(spec.resources.memory)
    yield Problem(
        Rule.MEMORY,
        "spec.resources.memory",
        f"a pod needs {readable_bytes(needed)} of host memory, sharedMemory {readable_bytes(shared_bytes)} "
        + (f"and {readable_bytes(replay)} for grpo.routingReplay included, " if replay else "included, ")
        + f"and would be killed at {spec.resources.memory}; set memory to {ceil_div(needed, GIB)}Gi"
        + (", or checkpoint.async to false" if fits_when_waiting else "")
        + (", or grpo.routingReplay to false" if replay and fits_without_replay else ""),
    )


def _limit_problems(spec: Spec, shape: ModelShape | None) -> Iterator[Problem]:
    """The problem of a limit that would come from a model which is not seen: a guess would kill its pods."""
    resources = spec.resources
    if resources.qos_class is QosClass.GUARANTEED and resources.memory is None and shape is None:
        yield Problem(
            Rule.CONFLICT,
            "spec.resources.qosClass",
            "Guaranteed limits pods to the host memory of the plan, which needs the model, and its config.json cannot "
            "be read from here; set resources.memory",
        )


def _storage_problems(spec: Spec, need: VolumeNeed) -> Iterator[Problem]:
    storage = spec.storage
    if storage.size is None:
        return
    if quantity_bytes(storage.size) < need.bytes:
        further = {"the export": need.export, "the downloaded model": need.download, "grpo.recordTokens": need.tokens}
        beside = "".join(f", {what} ({readable_bytes(size)})" for what, size in further.items() if size)
        best = "" if spec.checkpoint.keep_best is None else f", keepBest {spec.checkpoint.keep_best}"
        yield Problem(
            Rule.STORAGE,
            "spec.storage.size",
            f"{storage.size} cannot hold {need.checkpoints} checkpoints of {readable_bytes(need.checkpoint)} (keep "
            f"{spec.checkpoint.keep}{best} and the one being written){beside}; set size to "
            f"{ceil_div(need.bytes, GIB)}Gi or lower checkpoint.keep"
            + (", or grpo.recordTokens to false" if need.tokens else ""),
        )


def _job_warnings(spec: Spec, shape: ModelShape | None, sizes: Layout | None) -> Iterator[Problem]:
    if shape is not None and spec.data.max_length > shape.positions:
        yield Problem(
            Rule.POSITIONS,
            "spec.data.maxLength",
            f"maxLength {spec.data.max_length} is beyond the {shape.positions} positions the model was made for",
        )
    if sizes is None:
        return
    if sizes.nodes > 1 and "ReadWriteMany" not in spec.storage.access_modes and spec.storage.claim_name is None:
        yield Problem(
            Rule.STORAGE,
            "spec.storage.accessModes",
            f"{sizes.nodes} nodes share the volume, which most storage allows with ReadWriteMany only",
        )
    yield from _bubble_warnings(spec, sizes)
    yield from _small_batch_warnings(spec, sizes)
    if spec.resources.accelerator is Accelerator.GPU and memory_limit_bytes(spec.resources) is None:
        yield Problem(
            Rule.MEMORY,
            "spec.resources.gpuType",
            "without gpuType or gpuMemoryGiB nothing is refused for memory; compare the need below with your GPUs",
        )


def _bubble_warnings(spec: Spec, sizes: Layout) -> Iterator[Problem]:
    if sizes.pipeline == 1:
        return
    count = update_batch(spec, sizes).microbatches
    waiting = (sizes.pipeline - 1) / sizes.virtual_pipeline
    bubble = waiting / (waiting + count)
    if bubble >= NOTABLE_BUBBLE:
        yield Problem(
            Rule.MICROBATCHES,
            "spec.training.globalBatchSize",
            f"{count} microbatches on {sizes.pipeline} stages leave the GPUs idle for {bubble:.0%} of a step; raise "
            "globalBatchSize, lower pipeline or set virtualPipeline",
        )


def _small_batch_warnings(spec: Spec, sizes: Layout) -> Iterator[Problem]:
    rank_batch = update_batch(spec, sizes)
    if spec.resources.accelerator is not Accelerator.GPU or rank_batch.microbatches == 1:
        return
    if rank_batch.micro_tokens < BUSY_TOKENS:
        yield Problem(
            Rule.MICROBATCHES,
            "spec.training.dynamicBatchTokens",
            f"microbatches of at most {rank_batch.micro_tokens:,} tokens leave a GPU waiting for its host, which "
            f"takes as long for {BUSY_TOKENS:,}; set dynamicBatchTokens, to 8192 if memory allows, or raise "
            "microBatchSize",
        )


def _find_suggestions(
    spec: Spec, shape: ModelShape | None, problems: tuple[Problem, ...], wanted: int
) -> tuple[Suggestion, ...]:
    is_hopeless = any(p.rule in MENDED_ELSEWHERE and "parallelism" not in p.path for p in problems)
    if not problems or is_hopeless or wanted > MAX_GPUS:
        return ()
    from moejob_api.planner.suggestions import find_suggestions

    return find_suggestions(spec, shape, wanted, partial(_measure_fit, shape))


def _measure_fit(shape: ModelShape | None, spec: Spec) -> LayoutFit | None:
    """Return the size of an accepted job; the verdict without its words, because hundreds of layouts are validated."""
    from moejob_api.planner.suggestions import LayoutFit

    if layout_problems(spec, shape):
        return None
    sizes = derive_layout(spec.parallelism, spec.resources.gpus_per_node)
    if shape is None:
        return LayoutFit(sizes.gpus, sizes.nodes, None)
    need = estimate_footprint(prepare_case(spec, shape, sizes), memory_limit_bytes(spec.resources))
    if need is None or not is_within_host_memory(spec, need):
        return None
    return LayoutFit(sizes.gpus, sizes.nodes, need.bytes)
