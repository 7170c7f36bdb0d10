"""The reference model of GRPO takes the memory of a rank on CPUs that planning counts, with real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moejob_api.layout.sizes import derive_layout
from moejob_api.models.shape import Family
from moejob_api.planner.memory import MemoryUse, estimate_memory
from moejob_api.planner.memory.phases import MemoryPhase
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.reference import ReferenceWeights
from moejob_trainer.megatron.topology import stop_groups
from real_models import DENSE, find_real_model
from trainer.parity.cells import Cell, start_engine
from trainer.worlds import Worlds

PENALTY: dict[str, Any] = {
    "method": "GRPO",
    "grpo": {"kl": {"coefficient": 0.05}, "rewards": [{"name": "exact-match"}]},
    "resources": {"accelerator": "CPU"},
}


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def measure_reference(cell: Cell, folder: Path) -> tuple[dict[MemoryPhase, int], dict[MemoryPhase, int]]:
    """Return the bytes of the reference between its passes and in one: measured, and as planned."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        # Beside the engine's own.
        before = anonymous_bytes()
        reference = ReferenceWeights(engine.stages)
        measured = {MemoryPhase.TRAIN: anonymous_bytes() - before}
        with reference.use_reference():
            measured[MemoryPhase.SCORE] = anonymous_bytes() - before
    finally:
        stop_groups()
    job = cell.spec()
    phases = estimate_memory(job, engine.model.shape, derive_layout(job.parallelism, 8)).phases
    planned = {
        phase.phase: sum(part.bytes for part in phase.parts if part.name is MemoryUse.REFERENCE) for phase in phases
    }
    return measured, planned


def test_the_reference_on_cpus_takes_the_memory_that_is_planned(worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to(find_real_model(DENSE))
    ((measured, planned),) = worlds.run(1, measure_reference, Cell(Family.LLAMA, PENALTY), tmp_path)
    assert {phase: planned[phase] for phase in measured} == pytest.approx(measured, rel=0.03)
