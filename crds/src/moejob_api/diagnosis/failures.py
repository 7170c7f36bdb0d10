"""Findings in the last failure of a run: its cause as the operator saw it, and the launcher's termination message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from moejob_api import api_bodies
from moejob_api.diagnosis.blockers import Blocker
from moejob_api.diagnosis.findings import Finding
from moejob_api.job.reasons import Reason
from moejob_api.job.status import ConditionType, LastFailure, Status
from moejob_api.recovery.restarts import FailureCause

_BY_CAUSE: Mapping[str, Blocker] = MappingProxyType(
    {
        FailureCause.OUT_OF_MEMORY: Blocker.HOST_OUT_OF_MEMORY,
        FailureCause.PREEMPTED: Blocker.PREEMPTED,
        FailureCause.NODE_LOST: Blocker.NODE_LOST,
        FailureCause.SECRET_LOST: Blocker.SECRET_LOST,
        FailureCause.HUNG: Blocker.RANKS_HUNG,
        FailureCause.LOST_PEERS: Blocker.PEERS_LOST,
        FailureCause.BAD_CONFIGURATION: Blocker.CONFIGURATION_REFUSED,
        FailureCause.RANK_FAILED: Blocker.RANK_FAILED,
        FailureCause.POD_FAILED: Blocker.POD_FAILED,
    }
)
# The cluster's doing: no message of a rank explains these better.
_CERTAIN = frozenset({FailureCause.OUT_OF_MEMORY, FailureCause.PREEMPTED, FailureCause.NODE_LOST})
_SILENCES = frozenset({FailureCause.HUNG, FailureCause.LOST_PEERS, FailureCause.SECRET_LOST})


def _cause_rule(pattern: str, blocker: Blocker) -> tuple[re.Pattern[str], Blocker]:
    return re.compile(pattern, re.IGNORECASE), blocker


# The first pattern in a message decides: that of a full /dev/shm also says that no space is left.
_MESSAGE_RULES = (
    _cause_rule(r"CUDA out of memory|torch\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", Blocker.GPU_OUT_OF_MEMORY),
    _cause_rule(r"/dev/shm|shared memory|bus error|killed by signal 7\b", Blocker.SHARED_MEMORY_FULL),
    _cause_rule(r"out of memory; raise resources\.memory", Blocker.HOST_OUT_OF_MEMORY),
    _cause_rule(
        r"no space left on device|disk quota exceeded|the volume is full|on the volume, or make it", Blocker.DISK_FULL
    ),
    _cause_rule(r"belongs to job \S+ \(uid", Blocker.RUN_FOLDER_TAKEN),
    _cause_rule(
        r"make the folder writable|volume is mounted read-only|read-only file system|permission denied: '/",
        Blocker.VOLUME_UNWRITABLE,
    ),
    _cause_rule(
        r"no good checkpoint|is not the one that|is not a marker|checkpoints? .*(?:damaged|differs)",
        Blocker.CHECKPOINT_DAMAGED,
    ),
    _cause_rule(r"unavailableTimeoutSeconds", Blocker.REWARD_AWAY),
    _cause_rule(r"\breward \S+ (?:failed|cannot start|\()|failed reward", Blocker.REWARD_FAILED),
    _cause_rule(r"no engine (?:is ready|has served)|\bengine\b.*(?:ended|cannot start)", Blocker.ENGINE_NOT_READY),
    _cause_rule(r"needs GPU \d+ of its pod|fallen off the bus|no CUDA-capable device", Blocker.GPU_MISSING),
    _cause_rule(r"gated repo|\b40[13]\b.*huggingface|huggingface.*\b40[13]\b|the hub refuses", Blocker.HUB_REFUSED),
    _cause_rule(r"the hub is away|cannot reach .*hub|huggingface.*(?:timed out|connection|50\d|429)", Blocker.HUB_AWAY),
    _cause_rule(
        r"spec\.model|config\.json|the model (?:has|is|computes)|differs from the (?:published|trained)",
        Blocker.MODEL_REFUSED,
    ),
    _cause_rule(r"data (?:source|set)\b|\bspec\.data|data\.\w+|chat template|tokenizer|\.jsonl", Blocker.DATA_REFUSED),
    _cause_rule(r"pod \d+ has not been heard|nothing is heard of", Blocker.PEERS_LOST),
)


def failure_finding(failure: LastFailure, *, is_past: bool) -> Finding:
    """Return the obstacle that a failure shows. The message decides where the operator saw only that a rank ended."""
    blocker = _blocker_of(failure)
    since = api_bodies.as_time(failure.time)
    subject = (failure.node or "") if blocker in (Blocker.NODE_LOST, Blocker.GPU_MISSING) else failure.pod
    return Finding(blocker, _failure_text(failure), since, subject, is_past)


def _blocker_of(failure: LastFailure) -> Blocker:
    by_cause = _BY_CAUSE.get(failure.reason, Blocker.POD_FAILED)
    if failure.reason in _CERTAIN or failure.reason in _SILENCES:
        return by_cause
    return next((blocker for pattern, blocker in _MESSAGE_RULES if pattern.search(failure.message)), by_cause)


def _failure_text(failure: LastFailure) -> str:
    if failure.reason == FailureCause.BAD_CONFIGURATION and failure.message:
        return failure.message
    place = failure.pod if failure.rank is None else f"rank {failure.rank} of {failure.pod}"
    node = f" on node {failure.node}" if failure.node else ""
    end = failure.message or (failure.reason if failure.exit_code is None else f"exit code {failure.exit_code}")
    return f"{place}{node} failed: {end}"


def final_findings(status: Status) -> Iterator[Finding]:
    """Yield the obstacle of a job that has failed for good."""
    condition = next((entry for entry in status.conditions if entry.type is ConditionType.FAILED), None)
    if condition is None:
        return
    since = api_bodies.as_time(condition.last_transition_time)
    if condition.reason == Reason.DEADLINE_EXCEEDED:
        yield Finding(Blocker.DEADLINE_EXCEEDED, condition.message, since)
    elif status.last_failure is None:
        yield Finding(Blocker.CONFIGURATION_REFUSED, condition.message, since)
    elif condition.reason == Reason.BAD_CONFIGURATION:
        yield failure_finding(status.last_failure, is_past=True)
    else:
        finding, count = failure_finding(status.last_failure, is_past=True), status.restarts.since_checkpoint
        text = f"{finding.message}; gave up after {count} restarts without a new checkpoint"
        yield Finding(Blocker.BACKOFF_EXHAUSTED, text, since, finding.subject)
