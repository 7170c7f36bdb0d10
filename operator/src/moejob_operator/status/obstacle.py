"""The obstacle of a job in its status: the diagnosis of a user's client, made of the objects that the operator reads.

The operator reads no events, queues or nodes for it: these rights would be wider than its work needs. `moejob why`
reads them with the rights of its user.
"""

from __future__ import annotations

from moejob_api.diagnosis.diagnose import diagnose_job, keep_diagnosis
from moejob_api.diagnosis.evidence import Evidence, JobEvidence
from moejob_api.job.status import Diagnosis, Status
from moejob_operator.planning.observed_state import ObservedState


def find_obstacle(s: ObservedState, status: Status) -> Diagnosis | None:
    """Return the diagnosis of a job whose status is about to be written."""
    job = s.observation.job
    evidence = Evidence(
        JobEvidence(
            name=job.name,
            namespace=job.namespace,
            created_at=job.created_at,
            deleted_at=None,
            finalizers=(),
            ttl_seconds=None if job.spec is None else job.spec.lifecycle.ttl_seconds_after_finished,
            status=status,
        ),
        s.observation.pod_evidence,
        s.observation.claim_evidence,
    )
    return keep_diagnosis(s.status.why, diagnose_job(evidence, s.now))
