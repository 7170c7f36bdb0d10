"""The pods of a job that no cluster has seen: the first of each role, as the operator would create them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moejob_api.job import MoETrainingJob
from moejob_api.planner.plan import Plan
from moejob_operator.children.attempt import Attempt, Images, service_name
from moejob_operator.children.gangs import chosen_gang
from moejob_operator.children.pods import rollout_pod, trainer_pod

# An installation's own images, and a job's UID, are known in its cluster alone.
_IMAGES = Images(*(f"IMAGE-OF-THE-OPERATOR/{name}" for name in ("trainer", "trainer-colocated", "rollout")))
_UID = "00000000-0000-0000-0000-000000000000"
_GRACE_SECONDS = 600


def preview_pods(job: MoETrainingJob, plan: Plan) -> Iterator[dict[str, Any]]:
    """The first pod of each role; none of a job that is refused.

    What depends on the cluster is left out: a gang scheduler, labels of GPU nodes.
    """
    if plan.layout is None:
        return
    attempt = Attempt(
        name=job.metadata.name,
        namespace=job.metadata.namespace or "default",
        uid=_UID,
        spec=job.spec,
        layout=plan.layout,
        rollout=plan.rollout,
        service=service_name(job.metadata.name),
        number=0,
        gang=chosen_gang(job.spec, frozenset(), None),
        images=_IMAGES,
        pod_resources=plan.pod_resources,
        gpu_node_labels={},
        trainer_grace_seconds=_GRACE_SECONDS,
    )
    yield trainer_pod(attempt, 0)
    if attempt.engine_count:
        yield rollout_pod(attempt, 0)
