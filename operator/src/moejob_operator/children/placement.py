"""Placement of pods: taints they accept for how long, and which pods belong into one network domain.

No node is avoided: the scheduler may place a replaced pod on the node where its predecessor failed.
"""

from __future__ import annotations

from typing import Any

from moejob_api.arithmetic import ceil_div
from moejob_api.contract.pods import Label, PodRole
from moejob_api.job.lifecycle import GangScheduler
from moejob_api.layout.sizes import Layout
from moejob_operator.children.attempt import Attempt

# A silent node has this long to come back before its pods start elsewhere.
LOST_NODE_SECONDS = 30
_LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def pod_tolerations(attempt: Attempt) -> list[dict[str, Any]]:
    """The job's tolerations, and short ones for lost nodes unless the job has its own for them."""
    job_tolerations = attempt.spec.resources.tolerations
    job_keys = {toleration.key for toleration in job_tolerations}
    return [
        *(toleration.model_dump(mode="json", by_alias=True, exclude_none=True) for toleration in job_tolerations),
        *(
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
            for key in _LOST_NODE_TAINTS
            if key not in job_keys
        ),
    ]


def pod_affinity(attempt: Attempt, role: PodRole, index: int) -> dict[str, Any] | None:
    """Put pods with the most traffic into one domain and the others near it; None without a topology key."""
    key = attempt.spec.resources.topology_key
    if key is None or role is not PodRole.TRAINER or attempt.layout.nodes == 1:
        return None
    # Kueue places by its own annotations. It counts each affinity of pods as a role, and allows eight roles.
    if attempt.gang is GangScheduler.KUEUE:
        return None
    near = {"weight": 100, "podAffinityTerm": _affinity_term(attempt, key, None)}
    terms: dict[str, Any] = {"preferredDuringSchedulingIgnoredDuringExecution": [near]}
    size = pods_per_group(attempt.layout)
    if size > 1:
        first = index // size * size
        members = range(first, min(first + size, attempt.layout.nodes))
        terms["requiredDuringSchedulingIgnoredDuringExecution"] = [_affinity_term(attempt, key, members)]
    return {"podAffinity": terms}


def pods_per_group(layout: Layout) -> int:
    """Pods that share one tensor, context or expert group: the traffic inside is in every layer of every step."""
    group_gpus = max(layout.tensor * layout.context, layout.expert_tensor * layout.expert)
    return min(layout.nodes, ceil_div(group_gpus, layout.gpus_per_pod))


def _affinity_term(attempt: Attempt, key: str, members: range | None) -> dict[str, Any]:
    selector: dict[str, Any] = {
        "matchLabels": {
            Label.JOB_UID.value: attempt.uid,
            Label.ROLE.value: PodRole.TRAINER.value,
            Label.ATTEMPT.value: str(attempt.number),
        }
    }
    if members is not None:
        indices = [str(index) for index in members]
        selector["matchExpressions"] = [{"key": Label.INDEX.value, "operator": "In", "values": indices}]
    return {"labelSelector": selector, "topologyKey": key}
