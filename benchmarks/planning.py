"""Time to plan a job: the whole command, the planning alone, and the search for the best layout."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.record import Better, Result, record
from moejob_api.documents import read_file
from moejob_api.hardware import gpu_hardware
from moejob_api.job import MoETrainingJob
from moejob_api.job.resources import GpuType
from moejob_api.models.shape import ModelShape
from moejob_api.models.sources import UnseenModel, model_shape
from moejob_api.planner.plan import plan_job
from moejob_api.planner.search import best_layouts, candidate_layouts

EXAMPLES = Path(__file__).parent.parent / "examples"
JOB = EXAMPLES / "deepseek-v3-sft-512gpu.yaml"
WRONG = EXAMPLES / "wrong" / "deepseek-v3-sft-64gpu.yaml"
GPUS = 1024
# The variables by which bash asks are named after the program.
AS_INSTALLED = "import sys; sys.argv[0] = 'moejob'; from moejob_cli.__main__ import main; main()"


def main() -> None:
    """Measure everything and write the page."""
    results = [
        Result("planning", "`moejob plan`, whole process", process_seconds("plan", str(JOB)), "s", Better.LOWER, 0.3),
        Result(
            "planning", "`moejob validate`, whole process", process_seconds("validate", str(JOB)), "s", Better.LOWER
        ),
        Result("planning", "help of `moejob`, whole process", process_seconds("--help"), "s", Better.LOWER, 0.2),
        Result("planning", "completing a word, whole process", completion_seconds(), "s", Better.LOWER, 0.15),
        Result("planning", "Python that does nothing", process_seconds(), "s", Better.LOWER),
        Result("planning", "reading the YAML", milliseconds(lambda: read_file(str(JOB))), "ms", Better.LOWER),
        Result("planning", "planning an accepted job", planning_milliseconds(JOB), "ms", Better.LOWER, 20.0),
        Result(
            "planning", "planning a refused job, with suggestions", planning_milliseconds(WRONG), "ms", Better.LOWER
        ),
        *search_results(),
    ]
    record(results, ["pydantic", "typer", "PyYAML"])
    for result in results:
        print(f"{result.case:55} {result.value:10.4g} {result.unit:12} target {result.target or '-'}")


def search_results() -> list[Result]:
    """DeepSeek-V3 on 1024 GPUs: the whole search, and layouts distinguished a second, with all cuts of the layers."""
    job, shape = read_job_and_shape(JOB)
    count = sum(len(cuts) for cuts in candidate_layouts(job.spec, shape, GPUS))
    seconds = milliseconds(lambda: best_layouts(job.spec, shape, GPUS, gpu_hardware(GpuType.H100)), runs=5) / 1000
    return [
        Result("planning", f"`--auto`, DeepSeek-V3 on {GPUS} GPUs", seconds, "s", Better.LOWER, 2.0),
        Result(
            "planning",
            f"layouts told apart in that search, {count:,} in all",
            count / seconds,
            "a second",
            Better.HIGHER,
        ),
    ]


def planning_milliseconds(file: Path) -> float:
    """Planning alone: the job is parsed and the model's shape is known."""
    job, shape = read_job_and_shape(file)
    return milliseconds(lambda: plan_job(job.spec, shape))


def read_job_and_shape(file: Path) -> tuple[MoETrainingJob, ModelShape]:
    """The job of a file and the shape of its model, which is one of those that come along."""
    job = read_file(str(file))
    shape = model_shape(job.spec.model.source, job.spec.model.revision)
    if isinstance(shape, UnseenModel):
        raise SystemExit(f"{file}: {shape.reason}")
    return job, shape


def milliseconds(action: Callable[[], object], runs: int = 30) -> float:
    """Median of some runs after a warm-up."""
    action()
    return statistics.median(time_action(action) for _ in range(runs)) * 1000


def completion_seconds() -> float:
    """Median of what bash waits for after `moejob plan --ou` and a tab."""
    return process_seconds("plan", _MOEJOB_COMPLETE="complete_bash", COMP_WORDS="moejob plan --ou", COMP_CWORD="2")


def process_seconds(*arguments: str, runs: int = 11, **variables: str) -> float:
    """Median of whole processes, with further variables; without arguments, of a bare interpreter."""
    command = [sys.executable, "-c", AS_INSTALLED, *arguments] if arguments else [sys.executable, "-c", ""]
    # The packages are compiled once, as an installed environment has them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | variables

    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)

    run()
    return statistics.median(time_action(run) for _ in range(runs))


def time_action(action: Callable[[], object]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
