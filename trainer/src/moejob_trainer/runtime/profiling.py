"""Traces of the steps that training.profile names: a file for each rank that it names, and a table in the log.

A trace is written whole or not at all, and one that cannot be written costs the run a line in the log, never a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from moejob_api.contract.pods import RunFile
from moejob_api.job.training import Profile
from moejob_trainer.runtime.disk import Disk, publish_file
from moejob_trainer.runtime.environment import RankEnvironment
from moejob_trainer.runtime.ranges import named_range

# Bounds of one trace: rows of the table, and allocations of a snapshot, of about 1 kB each with their stacks.
TABLE_ROWS = 20
_MOST_ALLOCATIONS = 100_000


@dataclass(slots=True)
class StepProfiler:
    """Traces the steps from the first named one that this start of the ranks reaches to the last named one."""

    settings: Profile
    folder: Path
    rank: int
    has_gpu: bool
    _running: profile | None = field(init=False, default=None)

    @contextmanager
    def trace_step(self, number: int) -> Iterator[None]:
        """Run one step, counted from 1, inside; its trace is complete at the end of the last one."""
        last = self.settings.first_step + self.settings.steps - 1
        if self._running is None and self.settings.first_step <= number <= last:
            self._start()
        with step_range(number):
            yield
        if self._running is not None and number == last:
            self._stop(self._running, last)
            self._running = None

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.has_gpu else [])]
        if self.settings.memory and self.has_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)  # noqa: SLF001
        self._running = profile(activities=activities, record_shapes=True, profile_memory=self.settings.memory)
        self._running.start()

    def _stop(self, running: profile, last: int) -> None:
        running.stop()
        try:
            self._write_trace(running, f"step-{last}-rank-{self.rank}")
        except OSError as error:
            sys.stderr.write(f"the trace of step {last} was not written: {error}; training continues\n")
        finally:
            if self.settings.memory and self.has_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
        sys.stderr.write(f"{self._operator_table(running)}\n")

    def _write_trace(self, running: profile, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_published(self.folder / f"{name}.json.gz", running.export_chrome_trace)
        if self.settings.memory and self.has_gpu:
            _write_published(self.folder / f"{name}.memory.pickle", torch.cuda.memory._dump_snapshot)  # noqa: SLF001

    def _operator_table(self, running: profile) -> str:
        order = "self_cuda_time_total" if self.has_gpu else "self_cpu_time_total"
        table: str = running.key_averages().table(sort_by=order, row_limit=TABLE_ROWS, max_name_column_width=60)
        return f"the {TABLE_ROWS} longest operators of rank {self.rank}:\n{table}"


def step_tracer(environment: RankEnvironment, device: torch.device) -> Callable[[int], AbstractContextManager[None]]:
    """Return the context of each step of this rank: a name, and a trace of those steps that the job names."""
    settings = environment.spec.training.profile
    if settings is None or environment.rank not in settings.ranks:
        return step_range
    profiler = StepProfiler(settings, environment.folder / RunFile.PROFILE, environment.rank, device.type == "cuda")
    return profiler.trace_step


def step_range(number: int) -> AbstractContextManager[None]:
    """Name a step, counted from 1, in traces."""
    return named_range(f"step {number}")


def _write_published(path: Path, write: Callable[[str], object]) -> None:
    # torch compresses what ends in .gz, so the unfinished file ends as the finished one does.
    unfinished = path.with_name(f".{path.name}")
    write(str(unfinished))
    publish_file(Disk(), unfinished, path)
