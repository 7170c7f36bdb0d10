"""The best layouts of a job on a number of GPUs: every valid one is weighed, memory decides, then time.

What may change: the parallel sizes and how layers are cut, microBatchSize, recomputation, when nothing else fits
offloadOptimizer, and of GRPO's engines what the job leaves open (engine_choice.py). All else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from moejob_api.arithmetic import divisors
from moejob_api.derived import global_batch_size
from moejob_api.hardware import H100, Hardware, memory_limit_bytes
from moejob_api.job import Spec
from moejob_api.job.moe import Sharding
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.job.training import Recompute, RecomputeGranularity
from moejob_api.layout.sizes import Layout, derive_layout
from moejob_api.layout.stages import stage_splits
from moejob_api.models.shape import ModelShape
from moejob_api.planner.cost import StepCost, step_cost
from moejob_api.planner.cost.estimate import least_step_seconds, prepare_cost_case, step_seconds
from moejob_api.planner.cost.rates import GpuMachine
from moejob_api.planner.engine_choice import GpuDivision, gpu_divisions
from moejob_api.planner.memory import MemoryEstimate, estimate_memory
from moejob_api.planner.memory.case import prepare_case
from moejob_api.planner.memory.estimate import can_fit, can_hold_states, peak_bytes
from moejob_api.planner.memory.kinds import LayerKinds, layers_by_kind
from moejob_api.planner.pruning import can_divide_batch, can_divide_experts, can_divide_matrices, can_divide_sequences
from moejob_api.problems import Problem
from moejob_api.quantities import GIB
from moejob_api.rules import layout_problems

# More chunks a stage send more messages for ever smaller gains.
CHUNKS = (1, 2, 3, 4)
# Layouts whose problems are compared: what all of them have, the job has.
DIVISIONS_PROBED, LAYOUTS_PROBED = 3, 20
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
# The share of a GPU's memory that chosen layouts leave free, for needs that the estimate does not know.
HEADROOM = 0.05
# From cheap to dear; a dearer one is looked at only where a cheaper one does not fit.
RECOMPUTATIONS = (RecomputeGranularity.NONE, RecomputeGranularity.SELECTIVE, RecomputeGranularity.FULL)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """One layout with the settings that make it fit, and why it ranks where it does."""

    spec: Spec
    layout: Layout
    memory: MemoryEstimate
    cost: StepCost
    reasons: tuple[str, ...]


def best_layouts(
    spec: Spec, shape: ModelShape, gpus: int, hardware: Hardware, limit: int = 5
) -> tuple[LayoutChoice, ...]:
    """The fastest layouts on exactly `gpus` GPUs that keep every rule and fit, fastest first.

    One choice for each set of group sizes, with its best cut, microbatch and recomputation.
    """
    memory = int((memory_limit_bytes(spec.resources) or hardware.memory_bytes) * (1 - HEADROOM))
    inputs = _SearchInputs(spec, shape, layers_by_kind(shape), hardware, memory, set(layout_problems(spec, shape)))
    offloads = (spec.memory.offload_optimizer, 1.0) if _can_offload(spec) else (spec.memory.offload_optimizer,)
    ranking = _LayoutRanking(limit)
    for division in gpu_divisions(spec, shape, gpus, hardware):
        for offload in offloads:
            if _rank_grids(inputs, division, offload, ranking):
                break
    return tuple(_build_choice(inputs, entry) for entry in ranking.sorted_entries())


def find_constant_problems(spec: Spec, shape: ModelShape, gpus: int, hardware: Hardware) -> tuple[Problem, ...]:
    """Return the problems that the job has with every layout, without a search for the best."""
    common_problems: set[Problem] | None = None
    for division in islice(gpu_divisions(spec, shape, gpus, hardware), DIVISIONS_PROBED):
        layouts = candidate_layouts(division.spec, shape, division.trainer_gpus)
        for cuts in islice(layouts, LAYOUTS_PROBED):
            frugal = _candidate_spec(division.spec, cuts[0], (1, RecomputeGranularity.FULL, 0.0))
            problems = set(layout_problems(frugal, shape))
            common_problems = problems if common_problems is None else common_problems & problems
    return tuple(sorted(common_problems or ()))


@dataclass(frozen=True, slots=True)
class LeanestLayout:
    """The layout that needs the least memory of a GPU, at any cost in time."""

    parallelism: Parallelism
    bytes: int
    layouts: int


def find_leanest_layout(spec: Spec, shape: ModelShape, gpus: int) -> LeanestLayout | None:
    """Return the least need of any layout, for jobs that get none at all; None when the GPUs cannot be divided."""
    offload = 1.0 if _can_offload(spec) else spec.memory.offload_optimizer
    kinds = layers_by_kind(shape)
    needs: list[tuple[int, Parallelism]] = []
    for division in gpu_divisions(spec, shape, gpus, H100):
        for cuts in candidate_layouts(division.spec, shape, division.trainer_gpus):
            frugal = _candidate_spec(division.spec, cuts[0], (1, RecomputeGranularity.FULL, offload))
            sizes = derive_layout(cuts[0], spec.resources.gpus_per_node)
            needs.append((peak_bytes(prepare_case(frugal, shape, sizes, kinds)), cuts[0]))
    if not needs:
        return None
    least, parallelism = min(needs, key=lambda need: need[0])
    return LeanestLayout(parallelism, least, len(needs))


@dataclass(frozen=True, slots=True)
class _SearchInputs:
    """The inputs that are the same for every candidate. asked: problems that the job has with every layout."""

    spec: Spec
    shape: ModelShape
    kinds: LayerKinds
    hardware: Hardware
    memory: int
    known_problems: set[Problem]


@dataclass(frozen=True, slots=True)
class _CandidateGrid:
    """A grid with all its cuts and one microbatch size, and a lower bound of the seconds of any of the cuts."""

    least_seconds: float
    cuts: tuple[Parallelism, ...]
    micro: int


@dataclass(frozen=True, slots=True)
class _RankedLayout:
    seconds: float
    spec: Spec
    layout: Layout


@dataclass(slots=True)
class _LayoutRanking:
    """The fastest entries so far, one for each set of group sizes."""

    limit: int
    entries: dict[tuple[int, ...], _RankedLayout] = field(default_factory=dict)

    def seconds_to_beat(self, sizes: tuple[int, ...]) -> float:
        """Seconds that a candidate of these sizes must stay under to be ranked."""
        current_entry = self.entries.get(sizes)
        if current_entry is not None:
            return current_entry.seconds
        return self.most_seconds

    @property
    def most_seconds(self) -> float:
        """Seconds of the slowest entry that is ranked, once there are enough."""
        if len(self.entries) < self.limit:
            return float("inf")
        return max(entry.seconds for entry in self.entries.values())

    def add_entry(self, sizes: tuple[int, ...], entry: _RankedLayout) -> None:
        """Rank an entry that stays under the bar."""
        self.entries[sizes] = entry
        if len(self.entries) > self.limit:
            del self.entries[max(self.entries, key=lambda key: self.entries[key].seconds)]

    def sorted_entries(self) -> list[_RankedLayout]:
        """Fastest first."""
        return sorted(self.entries.values(), key=lambda entry: entry.seconds)


# --- candidates -----------------------------------------------------------------------------------------------------


def candidate_layouts(spec: Spec, shape: ModelShape, gpus: int) -> Iterator[tuple[Parallelism, ...]]:
    """Every way to factor the GPUs into groups that model and batch divide over, each with all cuts of the layers."""
    per_node = spec.resources.gpus_per_node
    if gpus > per_node and gpus % per_node:
        return
    for tensor in divisors(min(gpus, per_node)):
        if not can_divide_matrices(spec, shape, tensor):
            continue
        for pipeline in divisors(gpus // tensor):
            if pipeline > 1 and spec.memory.sharding.has_weight_shards:
                break
            cuts = tuple(_stage_cuts(len(shape.layers), pipeline))
            for sizes in _sizes_inside_stage(spec, shape, tensor, gpus // tensor // pipeline) if cuts else ():
                grid = {"tensor": tensor, "pipeline": pipeline, **sizes}
                yield tuple(spec.parallelism.model_copy(update={**grid, **cut}) for cut in cuts)


def _stage_cuts(layers: int, pipeline: int) -> Iterator[dict[str, object]]:
    """Ways to cut the layers into stages and chunks."""
    for chunks in CHUNKS if pipeline > 1 else (1,):
        for split in stage_splits(layers, pipeline, chunks):
            yield {
                "virtual_pipeline": chunks if chunks > 1 else None,
                "first_stage_layers": split.first_stage_layers,
                "last_stage_layers": split.last_stage_layers,
                "embedding_counts_as_layer": split.embedding_counts_as_layer,
                "loss_counts_as_layer": split.loss_counts_as_layer,
            }


def _sizes_inside_stage(spec: Spec, shape: ModelShape, tensor: int, remaining_gpus: int) -> Iterator[dict[str, object]]:
    """Sizes of the groups inside a pipeline stage of tensor x rest GPUs, each pair of grids once.

    Product is written where it says the same as Folded.
    """
    for context in divisors(remaining_gpus):
        data = remaining_gpus // context
        if not can_divide_sequences(spec, shape, tensor, context) or not can_divide_batch(spec, data, micro=1):
            continue
        for expert, expert_tensor in _expert_sizes(spec, shape, tensor, tensor * remaining_gpus):
            sizes: dict[str, object] = {"context": context, "expert": expert}
            if expert_tensor == tensor and data % expert == 0:
                yield {**sizes, "data": data // expert, "expert_layout": ExpertLayout.PRODUCT, "expert_tensor": None}
                continue
            share = expert_tensor if expert_tensor > 1 else None
            yield {**sizes, "data": data, "expert_layout": ExpertLayout.FOLDED, "expert_tensor": share}


def _expert_sizes(spec: Spec, shape: ModelShape, tensor: int, in_stage: int) -> Iterator[tuple[int, int]]:
    """Sizes of the expert and the expert tensor groups. Without experts there is one choice."""
    experts = shape.experts
    if experts is None:
        yield 1, tensor
        return
    for share in divisors(tensor):
        for expert in divisors(experts.count):
            if in_stage % (share * expert) == 0 and can_divide_experts(spec, shape, expert, share):
                yield expert, share


# --- weighing -------------------------------------------------------------------------------------------------------


def _rank_grids(inputs: _SearchInputs, division: GpuDivision, offload: float, ranking: _LayoutRanking) -> bool:
    """Rank every grid of the trainer's GPUs, and return whether any is among the fastest."""
    # No trainer is fast enough where the engines alone take too long.
    if division.weigh_step(0.0) >= ranking.most_seconds:
        return True
    before = dict(ranking.entries)
    # Most promising first: once five fast grids are known, their times rule out most others by the lower bound alone.
    for candidate in sorted(_candidate_grids(inputs, division, offload), key=lambda promise: promise.least_seconds):
        if candidate.least_seconds >= ranking.most_seconds:
            break
        _weigh_grid(inputs, division, candidate, offload, ranking)
    return ranking.entries != before


def _candidate_grids(inputs: _SearchInputs, division: GpuDivision, offload: float) -> Iterator[_CandidateGrid]:
    """Every grid with every microbatch whose weights, gradients and optimizer leave any room."""
    for cuts in candidate_layouts(division.spec, inputs.shape, division.trainer_gpus):
        sizes = derive_layout(cuts[0], inputs.spec.resources.gpus_per_node)
        machine = GpuMachine(inputs.hardware, sizes.gpus_per_pod)
        chunks = max(cut.virtual_pipeline or 1 for cut in cuts)
        for micro in _micro_batch_sizes(inputs.spec, sizes):
            plain = _candidate_spec(division.spec, cuts[0], (micro, RecomputeGranularity.NONE, offload))
            case = prepare_cost_case(plain, inputs.shape, sizes, inputs.kinds)
            if not can_hold_states(case, division.spec, inputs.memory):
                break
            yield _CandidateGrid(division.weigh_step(least_step_seconds(case, machine, chunks)), cuts, micro)


def _weigh_grid(
    inputs: _SearchInputs,
    division: GpuDivision,
    candidate: _CandidateGrid,
    offload: float,
    ranking: _LayoutRanking,
) -> None:
    """Rank the best cut and recomputation of a grid, if it can be fast enough to be ranked at all."""
    for cut in candidate.cuts:
        sizes = derive_layout(cut, inputs.spec.resources.gpus_per_node)
        if candidate.least_seconds >= ranking.seconds_to_beat(_group_sizes(sizes)):
            return
        if _can_divide_chunks(inputs.spec, sizes, candidate.micro):
            _weigh_cut(inputs, division, (cut, sizes), (candidate.micro, offload), ranking)


def _weigh_cut(
    inputs: _SearchInputs,
    division: GpuDivision,
    cut: tuple[Parallelism, Layout],
    settings: tuple[int, float],
    ranking: _LayoutRanking,
) -> None:
    (parallelism, sizes), (micro, offload) = cut, settings
    machine = GpuMachine(inputs.hardware, sizes.gpus_per_pod)
    for granularity in RECOMPUTATIONS:
        candidate = _candidate_spec(division.spec, parallelism, (micro, granularity, offload))
        cost_case = prepare_cost_case(candidate, inputs.shape, sizes, inputs.kinds)
        learning = sum(step_seconds(cost_case, machine).values())
        seconds = division.weigh_step(learning)
        # Recomputing more takes longer: a candidate that is too slow now stays too slow.
        if seconds >= ranking.seconds_to_beat(_group_sizes(sizes)):
            return
        if not can_fit(prepare_case(candidate, inputs.shape, sizes, inputs.kinds), inputs.memory):
            continue
        engines = division.choose_engines(learning)
        chosen = candidate.model_copy(update={"grpo": engines.spec.grpo})
        if not set(layout_problems(chosen, inputs.shape)) - inputs.known_problems:
            ranking.add_entry(_group_sizes(sizes), _RankedLayout(seconds, chosen, sizes))
        return


def _group_sizes(sizes: Layout) -> tuple[int, ...]:
    """The sizes that make two layouts different to a reader of the ranking."""
    return (sizes.tensor, sizes.pipeline, sizes.context, sizes.data, sizes.expert, sizes.expert_tensor)


def _micro_batch_sizes(spec: Spec, sizes: Layout) -> Iterator[int]:
    if spec.training.dynamic_batch_tokens is not None:
        yield 1
        return
    rank_sequences = global_batch_size(spec) // sizes.data
    yield from (micro for micro in MICRO_BATCH_SIZES if rank_sequences % micro == 0)


def _can_divide_chunks(spec: Spec, sizes: Layout, micro: int) -> bool:
    """Return whether an interleaved schedule gets microbatches in multiples of its stages."""
    if sizes.virtual_pipeline == 1 or spec.training.dynamic_batch_tokens is not None:
        return True
    return global_batch_size(spec) // sizes.data // micro % sizes.pipeline == 0


def _candidate_spec(spec: Spec, grid: Parallelism, settings: tuple[int, RecomputeGranularity, float]) -> Spec:
    micro, granularity, offload = settings
    training = spec.training.model_copy(
        update={"micro_batch_size": micro, "recompute": Recompute(granularity=granularity)}
    )
    memory = spec.memory.model_copy(update={"offload_optimizer": offload})
    return spec.model_copy(update={"parallelism": grid, "training": training, "memory": memory})


def _can_offload(spec: Spec) -> bool:
    return spec.memory.sharding is Sharding.DISTRIBUTED_OPTIMIZER and spec.memory.offload_optimizer < 1


def _build_choice(inputs: _SearchInputs, entry: _RankedLayout) -> LayoutChoice:
    memory = estimate_memory(entry.spec, inputs.shape, entry.layout)
    cost = step_cost(entry.spec, inputs.shape, entry.layout, inputs.hardware)
    return LayoutChoice(entry.spec, entry.layout, memory, cost, _ranking_reasons(memory, cost, inputs.memory))


def _ranking_reasons(memory: MemoryEstimate, cost: StepCost, limit_bytes: int) -> tuple[str, ...]:
    """Return the parts that take the time, the share of the pipeline's bubble, and the memory that is left."""
    largest = ", ".join(f"{part.name} {part.seconds / cost.seconds:.0%}" for part in cost.parts[:3])
    bubble = (f"pipeline bubble {cost.bubble_share:.0%}",) if cost.bubble_share > 0 else ()
    gib_left = (limit_bytes - memory.bytes) / GIB
    return (
        f"time: {largest}",
        *bubble,
        f"memory: {memory.bytes / GIB:.1f} of {limit_bytes / GIB:.1f} GiB, {gib_left:.1f} GiB left",
    )
