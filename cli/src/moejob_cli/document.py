"""A plan as the one object that `--output json|yaml` prints. Its keys are an interface for other programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from pydantic.alias_generators import to_camel

from moejob_api.hardware import OLDEST_DRIVER
from moejob_api.job.parallelism import Parallelism
from moejob_api.job.resources import Accelerator
from moejob_api.job.status import AppliedProfile
from moejob_api.models.parameters import active_parameters, total_parameters
from moejob_api.models.shape import ModelShape
from moejob_api.planner.cost.staleness import StalenessTime
from moejob_api.planner.plan import Plan
from moejob_api.planner.rollout_plan import RolloutPlan, rollout_of_plan
from moejob_api.problems import Problem


def plan_document(plan: Plan, profile: AppliedProfile | None = None) -> dict[str, Any]:
    """The plan as plain JSON values, with what the job has from its profile."""
    rollout_plan = rollout_of_plan(plan)
    return {
        "accepted": plan.is_accepted,
        "model": _model_fields(plan.shape) if plan.shape else None,
        "layout": _camel_case_fields(asdict(plan.layout)) | {"spares": plan.spec.resources.spares}
        if plan.layout
        else None,
        "memory": _memory_fields(plan),
        "pods": {role.value: _camel_case_fields(asdict(pod)) for role, pod in plan.pod_resources.items()},
        "driver": OLDEST_DRIVER if plan.spec.resources.accelerator is Accelerator.GPU else None,
        # asdict leaves properties out, and the sum of the volume is one.
        "volume": _camel_case_fields(asdict(plan.volume)) | {"bytes": plan.volume.bytes} if plan.volume else None,
        "rollout": _camel_case_fields(asdict(plan.rollout)) if plan.rollout else None,
        "rolloutTime": _rollout_time_fields(rollout_plan) if rollout_plan else None,
        "profile": _profile_fields(profile) if profile else None,
        "problems": _problem_fields(plan.problems),
        "warnings": _problem_fields(plan.warnings),
        "suggestions": [
            {
                "parallelism": parallelism_fields(suggestion.parallelism),
                **_camel_case_fields(asdict(suggestion.fit)),
                "distance": suggestion.distance,
            }
            for suggestion in plan.suggestions
        ],
    }


def profile_fields_by_path(profile: AppliedProfile) -> Iterator[tuple[str, Any]]:
    """Yield each field of spec that a job has from its profile, by its path."""
    for section, fields in profile.values.items():
        yield from ((f"{section}.{name}", value) for name, value in fields.items())


def _profile_fields(profile: AppliedProfile) -> dict[str, Any]:
    return {"kind": profile.kind, "name": profile.name, "values": dict(profile.values)}


def parallelism_fields(parallelism: Parallelism) -> dict[str, Any]:
    """The settings of spec.parallelism that differ from their defaults, as they are written in a job."""
    fields: dict[str, Any] = parallelism.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return fields


def _model_fields(shape: ModelShape) -> dict[str, Any]:
    return {
        "family": str(shape.family),
        "parameters": total_parameters(shape),
        "activeParameters": active_parameters(shape),
        "layers": len(shape.layers),
    }


def _memory_fields(plan: Plan) -> dict[str, Any] | None:
    need = plan.memory
    if need is None:
        return None
    return {
        "perGpuBytes": need.bytes,
        "limitBytes": plan.limit_bytes,
        "stage": need.stage,
        "phase": str(need.peak.phase),
        "hostBytesPerPod": need.host_bytes_per_pod,
        "parts": [{"name": str(part.name), "bytes": part.bytes, "why": part.why} for part in need.parts],
    }


def _rollout_time_fields(rollout: RolloutPlan) -> dict[str, Any]:
    return {
        "meanAnswerTokens": rollout.mean_tokens,
        "longestAnswerTokens": rollout.longest_tokens,
        "staleness": rollout.current.staleness,
        "steps": [_step_fields(step) for step in rollout.compared],
        "advice": list(rollout.advice),
    }


def _step_fields(step: StalenessTime) -> dict[str, Any]:
    return {
        "staleness": step.staleness,
        "stepSeconds": step.seconds,
        "syncSeconds": step.sync,
        "learnSeconds": step.learning,
        "waitSeconds": step.waiting,
        "trainerIdleShare": step.trainer_idle_share,
        "engineIdleShare": step.engine_idle_share,
    }


def _problem_fields(problems: Iterable[Problem]) -> list[dict[str, str]]:
    return [{"rule": str(p.rule), "path": p.path, "message": p.message} for p in problems]


def _camel_case_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {to_camel(name): value for name, value in fields.items()}
