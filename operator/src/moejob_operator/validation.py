"""Validation of a job: the planner's result, computed once for every generation of a spec.

Owns the cache of results; moejob_operator.planning decides what follows from them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import yaml

from moejob_api.contract.pod_environment import LONGEST_VALUE_BYTES, spec_text
from moejob_api.contract.pods import PodRole
from moejob_api.derived import RolloutLayout
from moejob_api.job import Spec
from moejob_api.layout.sizes import Layout
from moejob_api.models.sources import UnseenModel, model_shape
from moejob_api.planner.plan import Plan, plan_job
from moejob_api.planner.pod_resources import PodResources
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_api.profiles.fields import ProfileKind
from moejob_api.rules.limits import DEFAULT_LIMITS, JobLimits, limit_problems, namespace_problems
from moejob_operator.cluster import JobKey
from moejob_operator.expiring_cache import ExpiringCache
from moejob_operator.observed import Job

# Each reconcile goes through all pods of a job, and other jobs wait meanwhile.
MOST_PODS = 10_000


@dataclass(frozen=True, slots=True)
class Validation:
    """The planner's result. `unseen` is why the model could not be read, `suggestions` are layouts that fit."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    layout: Layout | None = None
    rollout: RolloutLayout | None = None
    memory_per_gpu_bytes: int | None = None
    pod_resources: Mapping[PodRole, PodResources] = field(default_factory=dict)
    unseen: str | None = None
    suggestions: tuple[str, ...] = ()

    @property
    def is_accepted(self) -> bool:
        """Return whether the job may run: it has no problems, and its layout is known."""
        return not self.problems and self.layout is not None

    @property
    def refusal_text(self) -> str:
        """Return the problems, and the layouts that would be accepted instead."""
        text = "; ".join(map(str, self.problems))
        return f"{text}. What would be accepted: {'; '.join(self.suggestions)}" if self.suggestions else text


def validate_spec(spec: Spec, limits: JobLimits = DEFAULT_LIMITS, *, with_suggestions: bool = True) -> Validation:
    """Validate a spec within limits. It reads no file of this disk that the job's author could name."""
    limit_violations = tuple(limit_problems(spec, limits))
    try:
        shape = model_shape(spec.model.config_source, spec.model.revision, local_paths=False)
        job_plan = plan_job(spec, None if isinstance(shape, UnseenModel) else shape, with_suggestions=with_suggestions)
    except InvalidSpec as refusal:
        return Validation((*refusal.problems, *limit_violations))
    return Validation(
        problems=(*job_plan.problems, *limit_violations, *_length_problems(spec), *_pod_problems(job_plan)),
        warnings=job_plan.warnings,
        layout=job_plan.layout,
        rollout=job_plan.rollout,
        memory_per_gpu_bytes=None if job_plan.memory is None else job_plan.memory.bytes,
        pod_resources=job_plan.pod_resources,
        unseen=shape.reason if isinstance(shape, UnseenModel) else None,
        suggestions=_suggestion_texts(job_plan),
    )


class Validator:
    """Caches results: a generation of a job keeps its result for as long as the job and this process live."""

    def __init__(
        self, check_spec: Callable[[Spec], Validation] = validate_spec, limits: JobLimits = DEFAULT_LIMITS
    ) -> None:
        self._check_spec = check_spec
        self._limits = limits
        self._validations: ExpiringCache[Validation] = ExpiringCache()

    async def validate_job(self, job: Job) -> Validation:
        """Return the validation of a job."""
        if job.missing_profile is not None:
            return Validation((missing_profile_problem(job.missing_profile, job.namespace),))
        if job.spec is None:
            return Validation(job.problems)
        if outside := tuple(namespace_problems(job.key.namespace, self._limits)):
            return Validation(outside)
        cached = self._validations.get(job.key, job.identity)
        if cached is not None:
            return cached
        # The search for layouts that fit may take seconds, in which the event loop has to renew the Lease.
        validation = await asyncio.to_thread(self._check_spec, job.spec)
        if job.problems:
            validation = replace(validation, problems=(*job.problems, *validation.problems))
        return self._validations.store(job.key, job.identity, validation)

    def forget(self, key: JobKey) -> None:
        """Drop the validation of a job that is gone."""
        self._validations.forget(key)


def missing_profile_problem(name: str, namespace: str) -> Problem:
    """Return the problem of a job whose profile cannot be found."""
    message = (
        f"{namespace} has no {ProfileKind.NAMESPACED} {name}, and the cluster has no {ProfileKind.CLUSTER} of that "
        "name; create one, and the job is accepted with it"
    )
    return Problem(Rule.PROFILE, "spec.profile", message)


def _pod_problems(job_plan: Plan) -> tuple[Problem, ...]:
    trainers = 0 if job_plan.layout is None else job_plan.layout.nodes + job_plan.spec.resources.spares
    # Engines on the trainer's GPUs are in its pods.
    engines = 0 if job_plan.rollout is None or not job_plan.rollout.gpus else job_plan.rollout.engines
    if trainers + engines <= MOST_PODS:
        return ()
    message = (
        f"the job needs {trainers + engines} pods, of which {MOST_PODS} at most are looked after at once; give each "
        "more GPUs with gpusPerNode"
    )
    return (Problem(Rule.NODE_SIZE, "spec.resources.gpusPerNode", message),)


def _length_problems(spec: Spec) -> tuple[Problem, ...]:
    size = len(spec_text(spec).encode())
    if size <= LONGEST_VALUE_BYTES:
        return ()
    message = (
        f"the spec has {size} bytes as JSON and reaches the pods as one variable, which has {LONGEST_VALUE_BYTES} at "
        "most; shorten data.chatTemplate, or leave it to the tokenizer"
    )
    return (Problem(Rule.ENVIRONMENT, "spec.data.chatTemplate", message),)


def _suggestion_texts(job_plan: Plan) -> tuple[str, ...]:
    texts = []
    for suggestion in job_plan.suggestions:
        fields = suggestion.parallelism.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        # One line, that can be pasted into a job as it is.
        layout = yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=math.inf).strip()
        texts.append(f"parallelism: {layout} on {suggestion.fit.gpus} GPUs")
    return tuple(texts)
