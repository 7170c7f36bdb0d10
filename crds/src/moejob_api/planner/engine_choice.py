"""The engines of GRPO for a search that may choose them: where they run, how many, how large, how far ahead. Pure.

Engines on the trainer's GPUs leave none idle, and those with GPUs of their own leave more memory to both, and generate
while the trainer learns where answers may be older than the weights. The search weighs them by the time of a step.

The trainer's layout decides its own seconds and nothing of the engines', and a step is never shorter for a slower
trainer: so all engines that leave the trainer the same GPUs and the same memory are weighed in one search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from moejob_api.arithmetic import divisors
from moejob_api.contract.engines import colocated_per_pod, separate_engines
from moejob_api.hardware import Hardware
from moejob_api.job import Spec
from moejob_api.job.grpo import Grpo, RolloutPlacement, RolloutSettings
from moejob_api.models.shape import ModelShape
from moejob_api.planner.cost.generation import GenerationTime
from moejob_api.planner.cost.rollout import RolloutTime, rollout_time
from moejob_api.planner.cost.staleness import staleness_time
from moejob_api.planner.memory.engine import EngineMemory, estimate_engine_among
from moejob_api.problems import Problem, Rule
from moejob_api.quantities import readable_bytes
from moejob_api.rules.object_rules.grpo_rules import MOST_STALENESS
from moejob_api.rules.rollout_rules import can_divide_model

# Eighths of the GPUs that separate engines may get.
SEPARATE_EIGHTHS = (1, 2, 3, 4, 5, 6)
# Values of rollout.staleness that are weighed, where the job gives none.
STALENESS_CHOICES = (0, 1, 2, 4)
# The most of a GPU's memory that an engine can be given; the rest is that of its driver and libraries.
LARGEST_SHARE = 0.95
LARGEST_ENGINES = {"placement": RolloutPlacement.SEPARATE, "gpu_memory_utilization": LARGEST_SHARE}


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Engines with a staleness, and their seconds; None for SFT."""

    spec: Spec
    staleness: int = 0
    rollout: RolloutTime | None = None
    generation: GenerationTime | None = None

    def weigh_step(self, learning_seconds: float) -> float:
        """Return the seconds of a step, longer by what older answers must gain."""
        if self.rollout is None or self.generation is None:
            return learning_seconds
        placement, sync_seconds = self.rollout.grpo.rollout.placement, self.rollout.sync_seconds
        step = staleness_time(placement, self.staleness, sync_seconds, learning_seconds, self.generation)
        return step.weighted_seconds


@dataclass(frozen=True, slots=True)
class GpuDivision:
    """The GPUs of the trainer, a job whose memory is that of all engines beside them, and these engines."""

    spec: Spec
    trainer_gpus: int
    engines: tuple[EngineChoice, ...]

    def weigh_step(self, learning_seconds: float) -> float:
        """Return the seconds of a step with the best engines; never less for a slower trainer."""
        return min(choice.weigh_step(learning_seconds) for choice in self.engines)

    def choose_engines(self, learning_seconds: float) -> EngineChoice:
        """Return the engines that make the step shortest for a trainer that takes so long."""
        return min(self.engines, key=lambda choice: choice.weigh_step(learning_seconds))


def gpu_divisions(spec: Spec, shape: ModelShape, gpus: int, hardware: Hardware) -> Iterator[GpuDivision]:
    """Yield the ways to divide all GPUs between trainer and engines, engines on the trainer's GPUs first.

    What the job says of its engines stays, but for engines that are too small to hold the model. Nothing is yielded
    where no engine holds it.
    """
    if spec.grpo is None:
        yield GpuDivision(spec, gpus, (EngineChoice(spec),))
        return
    rollout = spec.grpo.rollout
    if rollout.placement is RolloutPlacement.COLOCATED:
        for sized in with_runnable_engines(spec, shape, gpus):
            if engines := tuple(_timed_choices(sized, shape, gpus, hardware)):
                yield GpuDivision(sized, gpus, engines)
    if rollout.placement is RolloutPlacement.SEPARATE or "placement" not in rollout.model_fields_set:
        yield from _separate_divisions(spec, spec.grpo, shape, gpus, hardware)


def find_engine_problem(spec: Spec, shape: ModelShape, gpus: int, hardware: Hardware) -> Problem | None:
    """Return the reason that no engine of any size holds the model."""
    if spec.grpo is None or next(gpu_divisions(spec, shape, gpus, hardware), None) is not None:
        return None
    grpo = spec.grpo
    if "placement" not in grpo.rollout.model_fields_set:
        # Those with GPUs of their own have more memory.
        grpo = _with_rollout(spec, grpo, placement=RolloutPlacement.SEPARATE).grpo or grpo
    sizes = [grpo.rollout.tensor, *(size for size, _ in _engine_sizes(spec, grpo, shape, gpus))]
    largest = _with_rollout(spec, grpo, tensor=max(sizes)).grpo or grpo
    engine = _engine_memory(spec, largest, shape, gpus)
    if engine.can_run or engine.reserved is None:
        return None
    share = engine.least_bytes * largest.rollout.engine_share / engine.reserved
    remedy = (
        f"set gpuMemoryUtilization to {ceil(100 * share) / 100:.2f}"
        if share <= LARGEST_SHARE
        else "use GPUs with more memory"
    )
    return Problem(
        Rule.MEMORY,
        "spec.grpo.rollout",
        f"the largest engine that model and node allow, of {engine.gpus} GPUs, needs "
        f"{readable_bytes(engine.least_bytes)} of each for weights and one sequence, and gpuMemoryUtilization "
        f"{largest.rollout.engine_share:g} leaves it {readable_bytes(engine.reserved)}; {remedy}",
    )


def _timed_choices(spec: Spec, shape: ModelShape, gpus: int, hardware: Hardware) -> Iterator[EngineChoice]:
    """Yield the job's engines with each staleness that may be chosen."""
    if spec.grpo is None or not _engine_memory(spec, spec.grpo, shape, gpus).can_run:
        return
    time = rollout_time(spec, spec.grpo, shape, _engine_count(spec, spec.grpo, gpus), hardware)
    for staleness in _staleness_choices(spec.grpo.rollout):
        changed = _with_rollout(spec, spec.grpo, staleness=staleness)
        yield EngineChoice(changed, staleness, time, time.generation(staleness))


def _staleness_choices(rollout: RolloutSettings) -> tuple[int, ...]:
    if "staleness" in rollout.model_fields_set:
        return (rollout.staleness,)
    return tuple(choice for choice in STALENESS_CHOICES if choice <= MOST_STALENESS)


def with_runnable_engines(spec: Spec, shape: ModelShape, gpus: int) -> tuple[Spec, ...]:
    """The job with engines of each size that holds the model, the smallest first.

    Larger engines leave more memory to the trainer and answer faster, but there are fewer. Where no engine holds the
    model, the job stays as it is, and its engines are its problem.
    """
    if spec.grpo is None:
        return (spec,)
    current_engine = _engine_memory(spec, spec.grpo, shape, gpus)
    if current_engine.can_run and "tensor" in spec.grpo.rollout.model_fields_set:
        return (spec,)
    running = [
        changed
        for changed, larger_engine in ((spec, current_engine), *_larger_engines(spec, spec.grpo, shape, gpus))
        if larger_engine.can_run
    ]
    return tuple(running) or (spec,)


def _engine_sizes(spec: Spec, grpo: Grpo, shape: ModelShape, gpus: int) -> Iterator[tuple[int, Spec]]:
    """The job with each larger engine that fills pods and divides the model, the smallest first."""
    for tensor in divisors(_gpus_in_pod(spec, gpus)):
        if tensor > grpo.rollout.tensor and can_divide_model(shape, tensor):
            yield tensor, _with_rollout(spec, grpo, tensor=tensor)


def _larger_engines(spec: Spec, grpo: Grpo, shape: ModelShape, gpus: int) -> Iterator[tuple[Spec, EngineMemory]]:
    for _, changed in _engine_sizes(spec, grpo, shape, gpus):
        yield changed, _engine_memory(changed, changed.grpo or grpo, shape, gpus)


def _separate_divisions(
    spec: Spec, grpo: Grpo, shape: ModelShape, gpus: int, hardware: Hardware
) -> Iterator[GpuDivision]:
    """Yield the job with separate engines on some of the GPUs, on whole nodes where there are several."""
    divisions: dict[int, list[EngineChoice]] = {}
    for sized in _separate_engine_sizes(spec, grpo, shape, gpus):
        for counted in _with_replicas(sized, gpus):
            trainer_gpus = gpus - separate_engines(counted) * _engine_gpus(counted)
            divisions.setdefault(trainer_gpus, []).extend(_timed_choices(counted, shape, gpus, hardware))
    for trainer_gpus, engines in sorted(divisions.items()):
        if engines:
            yield GpuDivision(engines[0].spec, trainer_gpus, tuple(engines))


def _separate_engine_sizes(spec: Spec, grpo: Grpo, shape: ModelShape, gpus: int) -> tuple[Spec, ...]:
    """The job with separate engines of each size, which get more of their GPUs where no size holds the model."""
    separate = _with_rollout(spec, grpo, placement=RolloutPlacement.SEPARATE)
    sized = with_runnable_engines(separate, shape, gpus)
    if grpo.rollout.gpu_memory_utilization is not None or _can_run(sized[-1], shape, gpus):
        return sized
    larger = with_runnable_engines(_with_rollout(separate, grpo, **LARGEST_ENGINES), shape, gpus)
    return larger if _can_run(larger[-1], shape, gpus) else sized


def _can_run(spec: Spec, shape: ModelShape, gpus: int) -> bool:
    return spec.grpo is not None and _engine_memory(spec, spec.grpo, shape, gpus).can_run


def _with_replicas(spec: Spec, gpus: int) -> Iterator[Spec]:
    """Yield the job with each number of separate engines that leaves GPUs to the trainer."""
    if spec.grpo is None:
        return
    for replicas in _replica_counts(spec, spec.grpo.rollout, gpus):
        if replicas * spec.grpo.rollout.tensor < gpus:
            yield _with_rollout(spec, spec.grpo, replicas=replicas)


def _engine_gpus(spec: Spec) -> int:
    return 0 if spec.grpo is None else spec.grpo.rollout.tensor


def _replica_counts(spec: Spec, rollout: RolloutSettings, gpus: int) -> list[int]:
    if rollout.replicas is not None:
        return [rollout.replicas]
    unit = spec.resources.gpus_per_node if gpus > spec.resources.gpus_per_node else 1
    counts = {gpus * eighths // 8 // unit * unit // rollout.tensor for eighths in SEPARATE_EIGHTHS}
    return sorted(counts - {0})


def _engine_memory(spec: Spec, grpo: Grpo, shape: ModelShape, gpus: int) -> EngineMemory:
    return estimate_engine_among(spec, grpo, shape, _engine_count(spec, grpo, gpus))


def _engine_count(spec: Spec, grpo: Grpo, gpus: int) -> int:
    in_pod = _gpus_in_pod(spec, gpus)
    if grpo.rollout.placement is RolloutPlacement.COLOCATED:
        return max(1, gpus // in_pod * colocated_per_pod(spec, in_pod))
    return grpo.rollout.replicas or 1


def _gpus_in_pod(spec: Spec, gpus: int) -> int:
    return min(gpus, spec.resources.gpus_per_node)


def _with_rollout(spec: Spec, grpo: Grpo, **changes: object) -> Spec:
    changed = grpo.model_copy(update={"rollout": grpo.rollout.model_copy(update=changes)})
    return spec.model_copy(update={"grpo": changed})
