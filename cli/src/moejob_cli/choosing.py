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
from moejob_api.hardware import GIGA, TERA, Hardware, hardware, memory_limit_bytes
from moejob_api.job import Method, MoETrainingJob, Spec
from moejob_api.job.grpo import Rollout
from moejob_api.job.resources import GpuType
from moejob_api.layout.sizes import gpus as gpus_of
from moejob_api.models.shape import ModelShape
from moejob_api.models.sources import Unseen
from moejob_api.planner.engine_choice import with_engines_that_run
from moejob_api.planner.plan import plan
from moejob_api.planner.search import Choice, best_layouts, leanest
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_api.quantities import readable
from moejob_cli.document import parallelism_fields
from moejob_cli.inputs import seen_model
from moejob_cli.starter import Wish, starter_job

Named = TypeVar("Named", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured speeds that replace those of the table of GPUs; None keeps the table's."""

    tflops: float | None = None
    nvlink_gigabytes: float | None = None
    network_gigabytes: float | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """All options of the command line."""

    file: str | None
    model: str | None
    method: str
    gpu_type: str | None
    gpus: int | None
    sequence_tokens: int
    global_batch_size: int
    speeds: Speeds
    settings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """The layouts that were found, best first; `problems` say why there are none."""

    job: MoETrainingJob
    shape: ModelShape
    gpus: int
    hardware: Hardware
    choices: tuple[Choice, ...]
    problems: tuple[Problem, ...]


def chosen(wishes: Wishes) -> Chosen:
    """Return the best layouts for the request."""
    job = _job(wishes)
    shape = seen_model(job)
    if isinstance(shape, Unseen):
        raise InvalidSpec((Problem(Rule.MODEL_CONFIG, "spec.model.source", f"{shape.reason}; --auto has to see it"),))
    count = wishes.gpus or gpus_of(job.spec.parallelism) + _engine_gpus(job.spec)
    machine = _with_speeds(hardware(job.spec.resources), wishes.speeds)
    choices = best_layouts(job.spec, shape, count, machine)
    problems = () if choices else tuple(_why_none(job.spec, shape, count, machine))
    return Chosen(job, shape, count, machine, choices, problems)


def _engine_gpus(spec: Spec) -> int:
    """Return the GPUs of engines in pods of their own."""
    return 0 if spec.grpo is None else separate_engines(spec) * spec.grpo.rollout.tensor


def _why_none(spec: Spec, shape: ModelShape, count: int, machine: Hardware) -> Iterator[Problem]:
    """Yield the obstacles to every layout: the job itself, the number of GPUs, or their memory."""
    asked = with_engines_that_run(spec, shape, count)[0]
    yield from (problem for problem in plan(asked, shape).problems if "parallelism" not in problem.path)
    least = leanest(spec, shape, count)
    if least is None:
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
        f"the leanest of {least.layouts} layouts needs {readable(least.bytes)} of each GPU, "
        f"{machine.name} has {readable(memory_limit_bytes(spec.resources) or machine.memory_bytes)}; use more GPUs",
    )


def choices_document(found: Chosen) -> dict[str, Any]:
    """The layouts as plain values, for --output json|yaml."""
    return {
        "accepted": bool(found.choices),
        "gpus": found.gpus,
        "choices": [_choice_fields(choice) for choice in found.choices],
        "problems": [{"rule": str(p.rule), "path": p.path, "message": p.message} for p in found.problems],
    }


def write_job(found: Chosen, file: Path) -> None:
    """Write the job with the best layout to a new file."""
    better = found.job.model_copy(update={"spec": found.choices[0].spec})
    try:
        with file.open("x") as target:
            target.write(dump_job(better))
    except FileExistsError:
        message = f"{file} exists and is left as it is; name a new file"
        raise InvalidSpec((Problem(Rule.UNREADABLE, "--write", message),)) from None
    except OSError as error:
        message = f"{file} cannot be written: {error.strerror}"
        raise InvalidSpec((Problem(Rule.UNREADABLE, "--write", message),)) from None


def _choice_fields(choice: Choice) -> dict[str, Any]:
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


def _rollout_fields(rollout: Rollout) -> dict[str, Any]:
    return {"placement": str(rollout.placement), "replicas": rollout.replicas, "tensor": rollout.tensor}


def _job(wishes: Wishes) -> MoETrainingJob:
    """Return the job to start from: the file's, or a new one for the model, with the options of the command line."""
    if wishes.file is not None and wishes.model is not None:
        raise _misused("--model", f"{wishes.file} names its model already; give one of the two")
    if wishes.file is not None:
        return _on(read_file(wishes.file, wishes.settings), wishes)
    if wishes.settings:
        raise _misused("--set", "changes the job of a file; name one, or write the new job first with --write")
    if wishes.model is None:
        raise _misused("--auto", "name a job's YAML, or a model with --model")
    if wishes.gpus is None:
        raise _misused("--gpus", "without a job's YAML the number of GPUs has to be said")
    wish = Wish(
        wishes.model,
        _one_of(Method, wishes.method, "--method"),
        None,
        wishes.sequence_tokens,
        wishes.global_batch_size,
    )
    return _on(starter_job(wish), wishes)


def _on(job: MoETrainingJob, wishes: Wishes) -> MoETrainingJob:
    """Return the job with the GPU type of the command line, if there is one."""
    resources = job.spec.resources
    if wishes.gpu_type is not None:
        gpu_type = _one_of(GpuType, wishes.gpu_type, "--gpu-type")
        resources = resources.model_copy(update={"gpu_type": gpu_type, "gpu_memory_gi_b": None})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"resources": resources})})


def _with_speeds(machine: Hardware, speeds: Speeds) -> Hardware:
    if speeds.tflops is not None:
        machine = replace(machine, bf16_flops_per_second=speeds.tflops * TERA)
    if speeds.nvlink_gigabytes is not None:
        machine = replace(machine, nvlink_bytes_per_second=speeds.nvlink_gigabytes * GIGA)
    if speeds.network_gigabytes is not None:
        machine = replace(machine, network_bytes_per_second=speeds.network_gigabytes * GIGA)
    return machine


def _one_of(choices: type[Named], said: str, option: str) -> Named:
    by_name = {str(choice).lower(): choice for choice in choices}
    if said.lower() not in by_name:
        raise _misused(option, f"{said!r} is none of {', '.join(str(choice) for choice in choices)}")
    return by_name[said.lower()]


def _misused(option: str, message: str) -> InvalidSpec:
    return InvalidSpec((Problem(Rule.UNREADABLE, option, message),))
