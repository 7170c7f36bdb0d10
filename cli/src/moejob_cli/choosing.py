"""`moejob plan --auto`: options of the command line become a job, a search and the job with the best layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from moejob_api.contract.engines import separate_engines
from moejob_api.derived import global_batch_size
from moejob_api.documents import dump_job, read_file
from moejob_api.hardware import GIGA, TERA, Hardware, job_hardware, memory_limit_bytes
from moejob_api.job import Method, MoETrainingJob, Spec
from moejob_api.job.grpo import RolloutSettings
from moejob_api.job.resources import GpuType
from moejob_api.layout.sizes import count_gpus as gpus_of
from moejob_api.models.shape import ModelShape
from moejob_api.models.sources import UnseenModel
from moejob_api.planner.engine_choice import find_engine_problem, with_runnable_engines
from moejob_api.planner.plan import plan_job
from moejob_api.planner.search import LayoutChoice, best_layouts, find_constant_problems, find_leanest_layout
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_api.quantities import readable_bytes
from moejob_cli.document import parallelism_fields
from moejob_cli.inputs import job_model_shape
from moejob_cli.starter import StarterOptions, starter_job

Named = TypeVar("Named", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class GpuSpeeds:
    """Measured speeds, which replace the speeds in the table of GPUs; None keeps the table's."""

    tflops: float | None = None
    nvlink_gigabytes: float | None = None
    network_gigabytes: float | None = None


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """All options of the command line."""

    file: str | None
    model: str | None
    method: str
    gpu_type: str | None
    gpus: int | None
    sequence_tokens: int
    global_batch_size: int
    speeds: GpuSpeeds
    settings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ChosenLayouts:
    """The layouts that were found, best first; `problems` say why there are none."""

    job: MoETrainingJob
    shape: ModelShape
    gpus: int
    hardware: Hardware
    choices: tuple[LayoutChoice, ...]
    problems: tuple[Problem, ...]


def choose_layouts(request: LayoutRequest) -> ChosenLayouts:
    """Return the best layouts for the request."""
    job = _starting_job(request)
    shape = job_model_shape(job)
    if isinstance(shape, UnseenModel):
        raise InvalidSpec((Problem(Rule.MODEL_CONFIG, "spec.model.source", f"{shape.reason}; --auto has to see it"),))
    # Without --gpus the search keeps the size of the job: its trainer, and engines in pods of their own.
    count = request.gpus or gpus_of(job.spec.parallelism) + _engine_gpus(job.spec)
    machine = _apply_speeds(job_hardware(job.spec.resources), request.speeds)
    # A layout mends none of these, so a search would only take time.
    if faults := tuple(_find_faults(job.spec, shape, count, machine)):
        return ChosenLayouts(job, shape, count, machine, (), faults)
    choices = best_layouts(job.spec, shape, count, machine)
    problems = () if choices else tuple(_find_obstacles(job.spec, shape, count, machine))
    return ChosenLayouts(job, shape, count, machine, choices, problems)


def _find_faults(spec: Spec, shape: ModelShape, count: int, machine: Hardware) -> Iterator[Problem]:
    """Yield the problems that the job has with every layout."""
    engine_problem = find_engine_problem(spec, shape, count, machine)
    if engine_problem is not None:
        yield engine_problem
    yield from find_constant_problems(spec, shape, count, machine)
    yield from (
        problem for problem in plan_job(spec, shape, with_suggestions=False).problems if problem.rule is Rule.STORAGE
    )


def _engine_gpus(spec: Spec) -> int:
    """Return the GPUs of engines in pods of their own."""
    return 0 if spec.grpo is None else separate_engines(spec) * spec.grpo.rollout.tensor


def _find_obstacles(spec: Spec, shape: ModelShape, count: int, machine: Hardware) -> Iterator[Problem]:
    """Yield the obstacles to every layout: the job itself, the number of GPUs, or their memory."""
    spec_with_engines = with_runnable_engines(spec, shape, count)[0]
    # Faults of the layout in the job stop no other layout.
    yield from (problem for problem in plan_job(spec_with_engines, shape).problems if "parallelism" not in problem.path)
    leanest_layout = find_leanest_layout(spec, shape, count)
    if leanest_layout is None:
        yield Problem(
            Rule.GPU_COUNT,
            "--gpus",
            f"{count} GPUs{' less those of engines' if _engine_gpus(spec) else ''} cannot be divided so that they fill "
            f"nodes of {spec.resources.gpus_per_node} and divide the "
            f"model and globalBatchSize {global_batch_size(spec)}; try a multiple of {spec.resources.gpus_per_node}",
        )
        return
    yield Problem(
        Rule.MEMORY,
        "--gpus",
        f"the leanest of {leanest_layout.layouts} layouts needs {readable_bytes(leanest_layout.bytes)} of each GPU, "
        f"{machine.name} has {readable_bytes(memory_limit_bytes(spec.resources) or machine.memory_bytes)}; use more "
        "GPUs",
    )


def choices_document(layouts: ChosenLayouts) -> dict[str, Any]:
    """The layouts as plain values, for --output json|yaml."""
    return {
        "accepted": bool(layouts.choices),
        "gpus": layouts.gpus,
        "choices": [_choice_fields(choice) for choice in layouts.choices],
        "problems": [{"rule": str(p.rule), "path": p.path, "message": p.message} for p in layouts.problems],
    }


def write_job(layouts: ChosenLayouts, file: Path) -> None:
    """Write the job with the best layout to a new file."""
    best_job = layouts.job.model_copy(update={"spec": layouts.choices[0].spec})
    try:
        with file.open("x") as target:
            target.write(dump_job(best_job))
    except FileExistsError:
        message = f"{file} exists and is left as it is; name a new file"
        raise InvalidSpec((Problem(Rule.UNREADABLE, "--write", message),)) from None
    except OSError as error:
        message = f"{file} cannot be written: {error.strerror}"
        raise InvalidSpec((Problem(Rule.UNREADABLE, "--write", message),)) from None


def _choice_fields(choice: LayoutChoice) -> dict[str, Any]:
    training = choice.spec.training
    return {
        "parallelism": parallelism_fields(choice.spec.parallelism),
        "microBatchSize": training.micro_batch_size,
        "recompute": str(training.recompute.granularity),
        "offloadOptimizer": choice.spec.memory.offload_optimizer,
        "rollout": None if choice.spec.grpo is None else _rollout_fields(choice.spec.grpo.rollout),
        "nodes": choice.layout.nodes,
        "perGpuBytes": choice.memory.bytes,
        "stepSeconds": choice.cost.seconds,
        "tokensPerSecondPerGpu": choice.cost.tokens_per_second_per_gpu,
        "mfu": choice.cost.mfu,
        "reasons": list(choice.reasons),
    }


def _rollout_fields(rollout: RolloutSettings) -> dict[str, Any]:
    return {
        "placement": str(rollout.placement),
        "replicas": rollout.replicas,
        "tensor": rollout.tensor,
        "gpuMemoryUtilization": rollout.gpu_memory_utilization,
        "staleness": rollout.staleness,
    }


def _starting_job(request: LayoutRequest) -> MoETrainingJob:
    """Return the job to start from: the file's, or a new one for the model, with the options of the command line."""
    if request.file is not None and request.model is not None:
        raise _option_error("--model", f"{request.file} names its model already; give one of the two")
    if request.file is not None:
        return _apply_gpu_type(read_file(request.file, request.settings), request)
    if request.settings:
        raise _option_error("--set", "changes the job of a file; name one, or write the new job first with --write")
    if request.model is None:
        raise _option_error("--auto", "name a job's YAML, or a model with --model")
    if request.gpus is None:
        raise _option_error("--gpus", "without a job's YAML the number of GPUs has to be said")
    options = StarterOptions(
        request.model,
        _parse_choice(Method, request.method, "--method"),
        None,
        request.sequence_tokens,
        request.global_batch_size,
    )
    return _apply_gpu_type(starter_job(options), request)


def _apply_gpu_type(job: MoETrainingJob, request: LayoutRequest) -> MoETrainingJob:
    """Return the job with the GPU type of the command line, if there is one."""
    resources = job.spec.resources
    if request.gpu_type is not None:
        gpu_type = _parse_choice(GpuType, request.gpu_type, "--gpu-type")
        # The file's gpuMemoryGiB is of the GPUs before, and a job that says both is refused.
        resources = resources.model_copy(update={"gpu_type": gpu_type, "gpu_memory_gi_b": None})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"resources": resources})})


def _apply_speeds(machine: Hardware, speeds: GpuSpeeds) -> Hardware:
    if speeds.tflops is not None:
        machine = replace(machine, bf16_flops_per_second=speeds.tflops * TERA)
    if speeds.nvlink_gigabytes is not None:
        machine = replace(machine, nvlink_bytes_per_second=speeds.nvlink_gigabytes * GIGA)
    if speeds.network_gigabytes is not None:
        machine = replace(machine, network_bytes_per_second=speeds.network_gigabytes * GIGA)
    return machine


def _parse_choice(choices: type[Named], text: str, option: str) -> Named:
    by_name = {str(choice).lower(): choice for choice in choices}
    if text.lower() not in by_name:
        raise _option_error(option, f"{text!r} is none of {', '.join(str(choice) for choice in choices)}")
    return by_name[text.lower()]


def _option_error(option: str, message: str) -> InvalidSpec:
    return InvalidSpec((Problem(Rule.UNREADABLE, option, message),))
