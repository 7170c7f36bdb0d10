"""The operator's table of contents: every handler that kopf calls, and its task.

kopf owns the watch of jobs, the login, the admission server, the settings and the lifecycle. It only reports events; a
queue of ours decides when a job is reconciled, and only in the replica that leads. Pods, Services and claims have
watches of their own: moejob_operator.kube_api.informers says why.
"""

from __future__ import annotations

from typing import Any

import kopf

from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_operator.admission import review
from moejob_operator.runtime import health
from moejob_operator.runtime.lifecycle import Operator

# kopf tries a failed handler again by itself; here a failure has to end the start, or the probe, at once.
_ONCE = kopf.ErrorsMode.PERMANENT


@kopf.on.startup(errors=_ONCE)
async def startup(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Start everything that is not kopf's: informers, election, queue, certificate, health."""
    memo.operator = await Operator.start(settings, memo)


@kopf.on.login(errors=_ONCE)
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Give kopf our session."""
    return _get_operator(memo).session.build_credentials()


@kopf.on.event(GROUP, VERSION, PLURAL)
async def job_event(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Keep the job, and ask for its reconciliation."""
    _get_operator(memo).receive_event(event)


@kopf.on.validate(GROUP, VERSION, PLURAL, id=review.HANDLER)
def validate(warnings: list[str], memo: kopf.Memo, operation: str = "", **_: Any) -> None:
    """Deny a job that cannot work. Runs in a thread: a check may take a while, and a Lease is renewed in the loop."""
    operator = _get_operator(memo)
    review.answer_review(operation, warnings, operator.limits, operator.find_profile)


@kopf.on.probe(id="operator", errors=_ONCE)
async def probe(memo: kopf.Memo, **_: Any) -> str:
    """Fail when a part has ended, or when kopf watches jobs no more."""
    troubles = _get_operator(memo).find_troubles()
    if troubles:
        raise kopf.PermanentError(health.format_lacks(troubles))
    return "ok"


@kopf.on.cleanup(errors=_ONCE)
async def cleanup(memo: kopf.Memo, **_: Any) -> None:
    """Let the work in hand end, give up the Lease, and stop everything."""
    await _get_operator(memo).stop()


def _get_operator(memo: kopf.Memo) -> Operator:
    operator: Operator = memo.operator
    return operator
