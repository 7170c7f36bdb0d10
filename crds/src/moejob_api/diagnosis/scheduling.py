"""Findings about pods without a node: the scheduler's sentence, taken apart.

A sentence such as `0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 node(s) didn't match Pod's node
affinity/selector. preemption: ...` counts each node once, under the first filter that refuses it. The reason of most
nodes is the obstacle; its counts are left out of the message, for they change with every node that comes and goes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from moejob_api.diagnosis.blockers import ADVICE, Blocker
from moejob_api.diagnosis.evidence import NodeEvidence, PodEvidence
from moejob_api.diagnosis.findings import Finding

# A scheduler that runs says something about a new pod within seconds.
SCHEDULER_SILENCE = timedelta(seconds=60)
_NODE_REASON = re.compile(r"(\d+) (.+?)(?=, \d+ |\.(?: |$)|$)")
# The scheduler adds what preemption could do.
_PREEMPTION = re.compile(r",? no new claims to deallocate|,?\.* preemption: ")
# Taints that no job tolerates, and that say nothing about GPUs.
_CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
_GANG_WORDS = re.compile(
    r"pod ?group|in gang|sibling pods|minMember|minAvailable|waiting on permit|plugin Coscheduling", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class _NodeRule:
    """A reason of the scheduler, the obstacle it stands for, and how a sentence names it. `{}` is its first group."""

    pattern: re.Pattern[str]
    blocker: Blocker
    text: str


def _node_rule(pattern: str, blocker: Blocker, text: str) -> _NodeRule:
    return _NodeRule(re.compile(pattern), blocker, text)


_NODE_RULES = (
    _node_rule(r"Insufficient cpu", Blocker.INSUFFICIENT_CPU, "cpu is used up"),
    _node_rule(r"Insufficient memory", Blocker.INSUFFICIENT_MEMORY, "memory is used up"),
    _node_rule(r"Insufficient (\S*gpu\S*)", Blocker.INSUFFICIENT_GPUS, "{} is used up"),
    _node_rule(r"Insufficient (\S+)", Blocker.INSUFFICIENT_RESOURCE, "{} is used up"),
    _node_rule(r"Too many pods", Blocker.INSUFFICIENT_RESOURCE, "nodes hold as many pods as they may"),
    _node_rule(
        r"untolerated taint\(?s?\)? ?\{(node\.kubernetes\.io/\S+?): ?\S*\}",
        Blocker.NODES_UNAVAILABLE,
        "nodes are unavailable ({})",
    ),
    _node_rule(r"were unschedulable", Blocker.NODES_UNAVAILABLE, "nodes are cordoned"),
    _node_rule(
        r"had untolerated taint \{(.+)\}", Blocker.TAINT, "nodes have the taint {}, which the job does not tolerate"
    ),
    _node_rule(r"had untolerated taint", Blocker.TAINT, "nodes have taints that the job does not tolerate"),
    _node_rule(
        r"didn't match Pod's node affinity|didn't match node selector",
        Blocker.NODE_SELECTOR,
        "nodes lack a label of resources.nodeSelector",
    ),
    _node_rule(
        r"didn't match pod (?:anti-)?affinity rules",
        Blocker.POD_AFFINITY,
        "nodes lie outside of the domain of the group (resources.topologyKey)",
    ),
    _node_rule(r"didn't match pod topology spread", Blocker.TOPOLOGY_SPREAD, "nodes would spread the pods unevenly"),
    _node_rule(
        r"volume node affinity conflict|didn't match PersistentVolume's node affinity|didn't find available persistent",
        Blocker.VOLUME_ELSEWHERE,
        "nodes do not reach the volume of the job",
    ),
    _node_rule(r"didn't have free ports", Blocker.INSUFFICIENT_RESOURCE, "a host port is taken"),
)
_CLAIM_RULES = (
    _node_rule(r'persistentvolumeclaim "([^"]+)" not found', Blocker.CLAIM_MISSING, "there is no claim {}"),
    _node_rule(r'persistentvolumeclaim "([^"]+)" is being deleted', Blocker.CLAIM_ENDING, "claim {} is being deleted"),
    _node_rule(
        r'persistentvolumeclaim "([^"]+)" bound to non-existent', Blocker.CLAIM_LOST, "the volume of claim {} is gone"
    ),
)
UNBOUND = "unbound immediate PersistentVolumeClaims"


def scheduling_findings(
    pods: tuple[PodEvidence, ...], nodes: tuple[NodeEvidence, ...], now: datetime
) -> Iterator[Finding]:
    """Yield what keeps pods from a node; the first pod with a reason speaks for all of them."""
    for pod in pods:
        condition = pod.find_condition("PodScheduled", "False")
        if pod.phase != "Pending" or pod.node or pod.ends_by is not None:
            continue
        if condition is None:
            yield from _unseen_pod(pod, now)
        elif condition.reason != "SchedulingGated":
            yield from sentence_findings(pod.name, condition.message, condition.since, nodes)


def _unseen_pod(pod: PodEvidence, now: datetime) -> Iterator[Finding]:
    """Yield a finding for a pod that its scheduler has not answered for: most likely none of that name runs."""
    if pod.created_at is None or now - pod.created_at < SCHEDULER_SILENCE:
        return
    name = pod.scheduler or "default-scheduler"
    yield Finding(
        Blocker.SCHEDULER_ABSENT, f"no scheduler {name} has looked at the pods of the job", pod.created_at, name
    )


def sentence_findings(
    pod: str, sentence: str, since: datetime | None, nodes: tuple[NodeEvidence, ...] = ()
) -> Iterator[Finding]:
    """Yield the finding in a sentence of the scheduler. A pod whose claim is unbound has none of its own."""
    for rule in _CLAIM_RULES:
        if claim := rule.pattern.search(sentence):
            yield Finding(rule.blocker, rule.text.format(claim[1]), since, claim[1])
            return
    if UNBOUND in sentence:
        return
    if "no nodes available to schedule pods" in sentence:
        yield Finding(Blocker.NO_NODES, "the cluster has no node for pods", since)
        return
    node_finding = _node_finding(pod, sentence, since, nodes)
    if node_finding is not None:
        yield node_finding
    elif _GANG_WORDS.search(sentence):
        yield Finding(Blocker.GANG_INCOMPLETE, f"not all pods of the gang fit at once: {_stable_text(sentence)}", since)
    elif sentence:
        yield Finding(Blocker.UNSCHEDULABLE, f"{pod} fits no node: {_stable_text(sentence)}", since)


def _node_finding(pod: str, sentence: str, since: datetime | None, nodes: tuple[NodeEvidence, ...]) -> Finding | None:
    _, separator, reasons = sentence.partition("nodes are available: ")
    reasons = _PREEMPTION.split(reasons)[0]
    counts: Counter[tuple[Blocker, str, str]] = Counter()
    for count, reason in _NODE_REASON.findall(reasons):
        if not any(taint in reason for taint in _CONTROL_PLANE):
            named_reason = _name_reason(reason)
            if named_reason is not None:
                counts[named_reason] += int(count)
    if not separator or not counts:
        return (
            Finding(Blocker.NO_NODES, "the cluster has no node but its control plane", since)
            if (separator and any(taint in reasons for taint in _CONTROL_PLANE))
            else None
        )
    blocker, text, subject = min(counts, key=lambda key: (-counts[key], ADVICE[key[0]].urgency, key[1]))
    if blocker in (Blocker.INSUFFICIENT_GPUS, Blocker.INSUFFICIENT_RESOURCE) and _is_unknown(subject, nodes):
        return Finding(Blocker.RESOURCE_UNKNOWN, f"no node of the cluster offers {subject}", since, subject)
    others = sorted(key[1] for key in counts if key[1] != text)
    return Finding(blocker, "; ".join((f"{pod} fits no node: {text}", *others)), since, subject)


def _name_reason(reason: str) -> tuple[Blocker, str, str] | None:
    for rule in _NODE_RULES:
        if match := rule.pattern.search(reason):
            subject = match[1].replace(": ", "=").removesuffix("=").removesuffix(":") if match.groups() else ""
            return rule.blocker, rule.text.format(subject), subject
    return None


def _is_unknown(resource: str, nodes: tuple[NodeEvidence, ...]) -> bool:
    """Return whether the nodes are known and none offers a device; a node whose devices all failed offers 0."""
    return "/" in resource and bool(nodes) and not any(node.offers.get(resource) for node in nodes)


def _stable_text(sentence: str) -> str:
    """Return a sentence without the numbers of nodes and pods that change while nothing else does."""
    return re.sub(r"(?<![-\w])\d+(?:/\d+)? ", "", _PREEMPTION.split(sentence)[0]).strip(" .")[:500]
