"""The GPUs that an engine of GRPO spans, for a search that may choose them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.arithmetic import divisors
from moejob_api.engines import colocated_per_pod
from moejob_api.job import Spec
from moejob_api.job.grpo import Grpo, Placement
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.engine import Engine, engine_among
from moejob_api.rules.rollout_rules import divides_model


def with_engines_that_run(spec: Spec, shape: ModelShape, gpus: int) -> Spec:
    """The job as it is where its engines hold the model; else with the smallest engines that do.

    Those with room for as many sequences as are worth running at once come first, those with room for any next. Where
    there are none the job stays as it is, and its engines are what is wrong with it.
    """
    if spec.grpo is None or _engine(spec, spec.grpo, shape, gpus).runs:
        return spec
    larger = [(changed, _engine(changed, grpo, shape, gpus)) for changed, grpo in _larger(spec, spec.grpo, shape, gpus)]
    running = [(changed, one) for changed, one in larger if one.runs]
    useful = [(changed, one) for changed, one in running if (one.sequences or 0) >= one.useful_sequences]
    return next((changed for changed, _ in (*useful, *running)), spec)


def _larger(spec: Spec, grpo: Grpo, shape: ModelShape, gpus: int) -> Iterator[tuple[Spec, Grpo]]:
    """The job with each larger engine that fills pods and divides the model, the smallest first."""
    for tensor in divisors(_in_pod(spec, gpus)):
        if tensor > grpo.rollout.tensor and divides_model(shape, tensor):
            changed = grpo.model_copy(update={"rollout": grpo.rollout.model_copy(update={"tensor": tensor})})
            yield spec.model_copy(update={"grpo": changed}), changed


def _engine(spec: Spec, grpo: Grpo, shape: ModelShape, gpus: int) -> Engine:
    in_pod = _in_pod(spec, gpus)
    if grpo.rollout.placement is Placement.COLOCATED:
        engines = max(1, gpus // in_pod * colocated_per_pod(spec, in_pod))
    else:
        engines = grpo.rollout.replicas or 1
    return engine_among(spec, grpo, shape, engines)


def _in_pod(spec: Spec, gpus: int) -> int:
    return min(gpus, spec.resources.gpus_per_node)
