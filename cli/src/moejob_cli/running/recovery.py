"""What is done about launchers that end or fall silent: the operator's rules, for one run that nobody else looks after.

Pure. Which rung of the ladder holds is for moejob_api.restarts to say; here is what counts as a failure, and what
belongs to one that has been answered already. Knows neither processes nor clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moejob_api.contract import ExitCode, LastWord, PodProgress
from moejob_api.restarts import (
    LAUNCHER_FIRST_SECONDS,
    Budget,
    Cause,
    Decision,
    Failure,
    GiveUp,
    ReplaceGang,
    ReplacePods,
    RestartRanks,
    cause_of_exit,
    decide,
    restarted_in_place,
)

_RANKS_NAMED = 8


@dataclass(frozen=True, slots=True)
class PodSeen:
    """One launcher: how it ended, or what it said last. `quiet_seconds`: since one of its ranks was heard."""

    index: int
    exit_code: int | None = None
    word: LastWord | None = None
    heard: PodProgress | None = None
    seconds: float = 0.0
    quiet_seconds: float = 0.0

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.exit_code is None

    @property
    def is_ready(self) -> bool:
        """Whether all its ranks have been heard, or are done."""
        return self.exit_code == ExitCode.DONE or (self.is_running and self.heard is not None and self.heard.ready)


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered between looks. `restarts` counts for whoever watches, the budget for the rules."""

    budget: Budget
    nodes: int
    restarts: int = 0
    checkpoint_step: int | None = None
    # Restarts in place of the present launchers that were charged; None until all of them have been heard.
    rank_restarts: int | None = None
    replacing: frozenset[int] = frozenset()


def looked(pods: Sequence[PodSeen], memory: Memory) -> Memory:
    """What is known after a look: a new checkpoint forgives, a gang that is whole again has answered for its losses."""
    memory = _renewed(memory, _saved_step(pods))
    if len(pods) < memory.nodes:
        return memory
    if memory.replacing:
        return replace(memory, replacing=frozenset()) if all(pod.is_ready for pod in pods) else memory
    reported = _rank_restarts(pods, memory)
    if reported is not None and (memory.rank_restarts is None or reported < memory.rank_restarts):
        return replace(memory, rank_restarts=reported)
    return memory


def answered(pods: Sequence[PodSeen], memory: Memory, deadline_seconds: int) -> tuple[Decision | None, Memory]:
    """What to do about everything that failed since the last decision, and what is remembered of it."""
    failures = _failures(pods, memory, deadline_seconds)
    if not failures:
        return None, memory
    decision = decide(failures, memory.budget)
    if not isinstance(decision, GiveUp) and _belongs_to_last(failures, memory):
        decision = _absorbed(failures, memory)
    decision = _mendable(decision, pods)
    return decision, _after(decision, pods, memory)


def exit_code_of(pods: Sequence[PodSeen]) -> int:
    """How `moejob run` ends when it gives up."""
    is_permanent = any(pod.exit_code == ExitCode.BAD_CONFIGURATION for pod in pods)
    return ExitCode.BAD_CONFIGURATION if is_permanent else 1


# --- what failed ------------------------------------------------------------------------------------------------------


def _failures(pods: Sequence[PodSeen], memory: Memory, deadline_seconds: int) -> tuple[Failure, ...]:
    ended = tuple(_ended(pods))
    # Who is taken away saves first, and all ranks save together, also where only one launcher was asked.
    if all(failure.cause is Cause.PREEMPTED for failure in ended) and any(pod.is_running for pod in pods):
        ended = ()
    if ended or memory.replacing or len(pods) < memory.nodes:
        return ended
    limit = deadline_seconds + LAUNCHER_FIRST_SECONDS
    return tuple(_silent(pods, limit)) or tuple(_restarted(pods, memory))


def _ended(pods: Sequence[PodSeen]) -> Iterator[Failure]:
    for pod in pods:
        if pod.exit_code is None:
            continue
        cause = cause_of_exit(pod.exit_code, None if pod.word is None else pod.word.outcome)
        if cause is not None:
            yield Failure(pod.index, cause, message=_why(pod))


def _why(pod: PodSeen) -> str:
    if pod.word is not None and pod.word.message:
        return pod.word.message
    code = pod.exit_code or 0
    return f"its launcher was killed by signal {-code}" if code < 0 else f"its launcher ended with exit code {code}"


def _silent(pods: Sequence[PodSeen], limit: float) -> Iterator[Failure]:
    # Nobody is silent before the last one came, or beside one that has ended.
    if not all(pod.is_running for pod in pods) or min(pod.seconds for pod in pods) < limit:
        return
    for pod in pods:
        ranks = sorted(beat.rank for beat in pod.heard.ranks if beat.age_seconds >= limit) if pod.heard else []
        if ranks:
            named = ", ".join(map(str, ranks[:_RANKS_NAMED])) + (" ..." if len(ranks) > _RANKS_NAMED else "")
            noun = "rank" if len(ranks) == 1 else "ranks"
            yield Failure(pod.index, Cause.HUNG, message=f"{noun} {named} silent for {limit:.0f} s")
        elif pod.quiet_seconds >= limit:
            yield Failure(pod.index, Cause.HUNG, message=f"no rank has been heard for {limit:.0f} s")


def _restarted(pods: Sequence[PodSeen], memory: Memory) -> Iterator[Failure]:
    reported = _rank_restarts(pods, memory)
    if memory.rank_restarts is None or reported is None or reported <= memory.rank_restarts:
        return
    most = max(pods, key=lambda pod: pod.heard.restarts if pod.heard else 0)
    yield restarted_in_place(most.index, most.heard.fault if most.heard else None)


def _rank_restarts(pods: Sequence[PodSeen], memory: Memory) -> int | None:
    if len(pods) < memory.nodes:
        return None
    counts = [pod.heard.restarts for pod in pods if pod.heard is not None]
    return sum(counts) if len(counts) == len(pods) else None


# --- what belongs together --------------------------------------------------------------------------------------------


def _belongs_to_last(failures: Sequence[Failure], memory: Memory) -> bool:
    """Whether only launchers failed that stood beside one being replaced: its peers do not always survive it."""
    return bool(memory.replacing) and all(failure.pod not in memory.replacing for failure in failures)


def _absorbed(failures: Sequence[Failure], memory: Memory) -> Decision:
    pods = tuple(failure.pod for failure in failures)
    reason = f"pod {pods[0]} failed with the one being replaced"
    if 0 in pods:
        return ReplaceGang(0.0, memory.budget.with_new_pods(), reason)
    return ReplacePods(pods, 0.0, memory.budget, reason)


def _mendable(decision: Decision | None, pods: Sequence[PodSeen]) -> Decision | None:
    """One that has ended well cannot meet a new launcher any more."""
    if isinstance(decision, ReplacePods) and any(pod.exit_code == ExitCode.DONE for pod in pods):
        return ReplaceGang(decision.after_seconds, decision.budget.with_new_pods(), decision.reason)
    return decision


def _after(decision: Decision | None, pods: Sequence[PodSeen], memory: Memory) -> Memory:
    match decision:
        case RestartRanks(budget=budget):
            # The launchers have restarted their ranks already: only the charge is left to be noted.
            return replace(
                memory, budget=budget, restarts=memory.restarts + 1, rank_restarts=_rank_restarts(pods, memory)
            )
        case ReplacePods(pods=lost, budget=budget):
            replacing = memory.replacing | frozenset(lost)
            return replace(memory, budget=budget, restarts=memory.restarts + 1, rank_restarts=None, replacing=replacing)
        case ReplaceGang(budget=budget):
            return replace(
                memory, budget=budget, restarts=memory.restarts + 1, rank_restarts=None, replacing=frozenset()
            )
        case GiveUp() | None:
            return memory


# --- the budget -------------------------------------------------------------------------------------------------------


def _saved_step(pods: Sequence[PodSeen]) -> int | None:
    first = next((pod.heard for pod in pods if pod.index == 0), None)
    return None if first is None or first.run is None else first.run.last_checkpoint_step


def _renewed(memory: Memory, saved: int | None) -> Memory:
    if saved is None or saved == memory.checkpoint_step:
        return memory
    # A lower one is an older one: the newest could not be read. What was spent stays spent.
    is_older = memory.checkpoint_step is not None and saved < memory.checkpoint_step
    budget = memory.budget if is_older else memory.budget.renewed()
    return replace(memory, checkpoint_step=saved, budget=budget)
