"""The memory estimate of a job: the fullest stage in its fullest phase, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moejob_api.arithmetic import ceil_div
from moejob_api.job import Spec
from moejob_api.job.resources import Accelerator
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.activations import layer_bytes
from moejob_api.planner.memory.case import Case, prepared
from moejob_api.planner.memory.constants import HOST_PROCESS_BYTES
from moejob_api.planner.memory.engine import EngineMemory
from moejob_api.planner.memory.explained import why
from moejob_api.planner.memory.phases import Amounts, MemoryPhase, Name, StageBytes, load, phases
from moejob_api.planner.memory.routing_replay import replay_bytes
from moejob_api.planner.memory.storage import checkpoint_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """One use of memory on one GPU, and the formula behind it."""

    name: Name
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The fullest stage of one phase."""

    phase: MemoryPhase
    stage: int
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """All parts."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of the fullest GPU. `phases` holds the peak of every phase, `peak` is the highest of them.

    host_bytes_per_pod: host memory of the ranks of one pod; on CPU all of their memory. replay_bytes_per_pod: the part
    of it that holds routing to replay.
    """

    peak: PhasePeak
    phases: tuple[PhasePeak, ...]
    host_bytes_per_pod: int
    replay_bytes_per_pod: int
    engine: EngineMemory | None

    @property
    def bytes(self) -> int:
        """The highest peak."""
        return self.peak.bytes

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts of the highest peak."""
        return self.peak.parts

    @property
    def stage(self) -> int:
        """The fullest pipeline stage."""
        return self.peak.stage

    def fits(self, limit_bytes: int) -> bool:
        """Return whether every phase stays within a GPU's memory and the engine, if any, has room for a sequence."""
        return self.bytes <= limit_bytes and (self.engine is None or self.engine.runs)


def estimate(spec: Spec, shape: ModelShape, layout: Layout) -> MemoryEstimate:
    """The memory that a job takes on each GPU and in each pod; its layout must keep moejob_api.rules."""
    case = prepared(spec, shape, layout)
    layers = layer_bytes(case)
    loads = tuple(load(case, stage, layers) for stage in case.stages)
    peaks = tuple(_explained(*fullest) for fullest in _fullest(loads))
    replay = replay_bytes(case)
    return MemoryEstimate(
        peak=max(peaks, key=lambda peak: peak.bytes),
        phases=peaks,
        host_bytes_per_pod=_host_bytes(case, loads, max(peak.bytes for peak in peaks)) + replay,
        replay_bytes_per_pod=replay,
        engine=loads[0].engine,
    )


@dataclass(frozen=True, slots=True)
class Footprint:
    """The sums of an estimate, without its words: for layouts that are tried by the dozen."""

    bytes: int
    host_bytes_per_pod: int


def footprint(case: Case, limit_bytes: int | None) -> Footprint | None:
    """Return the sums that `estimate` explains; None where they are beyond the limit of a GPU."""
    loads = _loads_within(case, limit_bytes)
    if loads is None:
        return None
    peak = max(map(_peak, loads))
    return Footprint(peak, _host_bytes(case, loads, peak) + replay_bytes(case))


def fits(case: Case, limit_bytes: int) -> bool:
    """Return whether every stage is within the limit in every phase, and the engine has room for a sequence."""
    # A search asks this of thousands of layouts: the first stage beyond the limit ends it.
    return _loads_within(case, limit_bytes) is not None


def _loads_within(case: Case, limit_bytes: int | None) -> tuple[StageBytes, ...] | None:
    """Return the load of every stage; None at the first that is beyond the limit."""
    layers, loads = layer_bytes(case), list[StageBytes]()
    for stage in case.stages:
        of = load(case, stage, layers)
        if limit_bytes is not None and ((of.engine is not None and not of.engine.runs) or _peak(of) > limit_bytes):
            return None
        loads.append(of)
    return tuple(loads)


def _peak(of: StageBytes) -> int:
    return max(sum(amounts.values()) for _, amounts in phases(of))


def peak_bytes(case: Case) -> int:
    """The highest peak alone, without its words, for searches."""
    layers = layer_bytes(case)
    return max(_peak(load(case, stage, layers)) for stage in case.stages)


def _fullest(loads: tuple[StageBytes, ...]) -> Iterator[tuple[MemoryPhase, StageBytes, Amounts]]:
    """The fullest stage of each phase."""
    of_stages = [(of, dict(phases(of))) for of in loads]
    for phase in of_stages[0][1]:
        yield max(((phase, of, amounts[phase]) for of, amounts in of_stages), key=lambda entry: sum(entry[2].values()))


def _explained(phase: MemoryPhase, of: StageBytes, amounts: Amounts) -> PhasePeak:
    parts = tuple(Part(name, amount, why(of, name)) for name, amount in amounts.items() if amount)
    return PhasePeak(phase, of.stage.index, parts)


def _host_bytes(case: Case, loads: tuple[StageBytes, ...], peak: int) -> int:
    """Host memory of the ranks of a pod, without the routing that is replayed."""
    return case.layout.gpus_per_pod * _host_bytes_of_rank(case, loads, peak)


def _host_bytes_of_rank(case: Case, loads: tuple[StageBytes, ...], peak: int) -> int:
    """Return a rank's own host memory, what is offloaded, and the copy of a checkpoint that is being written."""
    # The tensors of a rank on CPUs are in host memory already, so the estimate of its "GPU" is all of it.
    if case.spec.resources.accelerator is Accelerator.CPU:
        return peak
    fullest = max(of.states.host + of.activations.offloaded + _parked(of) for of in loads)
    if not case.spec.checkpoint.asynchronous:
        return HOST_PROCESS_BYTES + fullest
    return HOST_PROCESS_BYTES + fullest + ceil_div(checkpoint_bytes(case.shape, case.spec), case.layout.gpus)


def _parked(of: StageBytes) -> int:
    """Weights that wait in host memory: the reference's, and the trainer's own during generation."""
    own = of.states.weights if of.case.spec.memory.offload_parameters else 0
    return own + (of.states.weights if of.has_reference else 0)
