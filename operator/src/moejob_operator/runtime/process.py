"""One operator process: runs kopf with our handlers, and reports how it ended."""

from __future__ import annotations

import asyncio
import gc
import sys

import kopf
from kopf._core.engines.peering import Identity  # it has no public name

from moejob_operator.logs import Log
from moejob_operator.runtime.lifecycle import CLOSING_SECONDS, Operator
from moejob_operator.runtime.settings import Settings

log = Log(__name__)

# kopf's task that ends at a request to stop, by a signal or by a flag.
_STOPPING = "stop-flag checker"
# Thresholds of Python's collector. 10,000 new objects start a young collection, which takes some 10 ms where all are
# garbage; 10 times 50 of these, so five million objects, start a full one.
_COLLECTED_AFTER, _YOUNG, _OLD = 10_000, 10, 50
# How long the event loop waits for a thread that validates jobs, each time that it has let go of the interpreter: with
# Python's 5 ms, and dozens of connections in one turn of the loop, half a second passes in which nothing is answered.
_SWITCH_SECONDS = 0.0005


def keep_loop_prompt() -> None:
    """Keep the interpreter from holding up the event loop, however many pods there are or strangers ask.

    Only frameworks leave cycles behind; a full collection over 10,000 pods takes seconds and finds next to nothing.
    Imported objects stay, so collections skip them.
    """
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER, _YOUNG, _OLD)
    sys.setswitchinterval(_SWITCH_SECONDS)


async def run_operator(settings: Settings) -> int:
    """Run until SIGTERM, or until something ends that should not. Returns the exit code."""
    memo, before = kopf.Memo(settings=settings, stopping=asyncio.Event()), asyncio.all_tasks()
    parts = await kopf.spawn_tasks(
        memo=memo,
        # kopf's default needs the name of the user, and the user of an image has a number only.
        identity=Identity(settings.identity),
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        stop_flag=memo.stopping,
    )
    kopf_run = asyncio.ensure_future(kopf.run_tasks(parts, ignored=before))
    ended_parts, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    names = sorted(task.get_name() for task in ended_parts)
    if names != [_STOPPING]:
        log.error("a part of kopf has ended", part=", ".join(names))
    # After any end: kopf's task that waits for this flag would delay the exit by five seconds.
    memo.stopping.set()
    # kopf itself waits for each of its parts without a limit.
    await asyncio.wait({kopf_run}, timeout=settings.stop_seconds + 2 * CLOSING_SECONDS)
    if not kopf_run.done():
        lasting_parts = (task.get_name() for task in parts if not task.done())
        log.error("a part of kopf does not end", part=", ".join(lasting_parts))
    is_well = names == [_STOPPING] and kopf_run.done() and kopf_run.exception() is None
    operator: Operator | None = memo.get("operator")
    code = 0 if is_well and not (operator is not None and operator.has_failed) else 1
    log.info("stopped", exit_code=code)
    return code
