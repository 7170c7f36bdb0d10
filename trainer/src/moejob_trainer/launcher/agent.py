"""The launcher's loop: meet the other pods, start the ranks, watch them, and answer for how they end.

One round after the other until a departure. What an ending means is decided in ending.py, who may start is agreed in
meeting.py; here is only the order in which things are done. Ranks are killed before anything is said of them: peers of
a dead rank sit in a collective, and every second of that is lost.
"""

from __future__ import annotations

import errno
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from moejob_api.contract import ExitCode, LastWord, Outcome, PodProgress, RankBeat, RankFault, RunOwner, RunProgress
from moejob_api.restarts import Cause
from moejob_trainer.beats import BOARD, Board
from moejob_trainer.checkpoints import take
from moejob_trainer.errors import BadConfiguration, Superseded
from moejob_trainer.fencing import RESTART, claim
from moejob_trainer.launcher.ending import (
    FAILED,
    Author,
    Departure,
    Ending,
    Fault,
    blamed,
    ending_by,
    ending_by_stop,
    exit_code,
    is_failure,
    last_word,
    rank_fault,
)
from moejob_trainer.launcher.entry import Rank
from moejob_trainer.launcher.meeting import Meeting, Round
from moejob_trainer.launcher.memory import kills_for_memory
from moejob_trainer.launcher.options import Options
from moejob_trainer.launcher.pod import Pod
from moejob_trainer.launcher.ranks import Ranks
from moejob_trainer.launcher.says import Log
from moejob_trainer.launcher.stop import Stop, Stopped
from moejob_trainer.launcher.store import LostPeers
from moejob_trainer.starting import START, Way

log = Log()

_LOOK_SECONDS = 0.2
# Left of the grace period to say the last word once the ranks have saved.
_MARGIN_SECONDS, _MARGIN_SHARE = 5.0, 0.2
_LAST_TO_LEAVE_SECONDS = 5.0
_RANKS_NAMED = 8
_STARVED = ", out of memory; raise resources.memory"
_LASTING = (errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class AllEnded:
    """Every rank of this pod has ended well: with 0, or with 143 after saving."""

    exit_code: int


# What a watch comes to; an Ending is somebody else's.
_Seen = Fault | Ending | AllEnded


class BadFolder(Exception):
    """The run folder cannot be used; a retry would find the same."""


class LostFolder(Exception):
    """The run folder cannot be used now."""


class Agent:
    """One launcher. `run` may be called once."""

    def __init__(self, pod: Pod, options: Options, stop: Stop, ranks: Ranks) -> None:
        self._pod, self._target, self._stop, self._ranks = pod, options.target, stop, ranks
        self._meeting = Meeting(pod, stop, options.lost_seconds)
        self._board: Board | None = None
        self._restarts = 0
        self._fault: RankFault | None = None
        # Kills for memory in this container before the present round.
        self._starved = 0
        self._is_gathering = True
        # Since when the way to the next round is under way: since the process began, then since a round ended.
        self._since, self._is_new = options.began_at, True
        # When the ranks that were asked to save are killed.
        self._save_until: float | None = None

    def run(self) -> Departure:
        """Live through rounds until the job is done or this pod cannot go on."""
        departure = self._lived()
        # Whoever asked for /progress last heard of an earlier step.
        known = {"run": self._run_so_far(), "restarts": self._restarts, "fault": self._fault}
        return replace(departure, word=departure.word.model_copy(update=known))

    def _lived(self) -> Departure:
        try:
            self._meeting.open()
            return self._rounds()
        except Stopped:
            return Departure(ExitCode.SAVED_AND_STOPPED, self._word(Outcome.PREEMPTED, "stopped; nothing was unsaved"))
        except (LostPeers, Superseded) as error:
            return Departure(FAILED, self._word(Outcome.LOST_PEERS, str(error)))
        except LostFolder as error:
            return Departure(FAILED, self._word(Outcome.RANK_FAILED, str(error)))
        except BadFolder as error:
            return Departure(ExitCode.BAD_CONFIGURATION, self._word(Outcome.BAD_CONFIGURATION, str(error)))
        finally:
            self._ranks.kill()
            self._ranks.bury()

    def progress(self) -> PodProgress:
        """How the pod is doing. Called from other threads."""
        board, pids, first = self._board, self._ranks.pids, self._pod.first_rank
        heard = () if board is None or self._is_gathering else board.heard()
        beats = tuple(
            RankBeat(rank=first + local, pid=pids[first + local], step=row.step, age_seconds=row.age_seconds)
            for local, row in enumerate(heard)
            if first + local in pids
        )
        return PodProgress(
            attempt=self._pod.attempt,
            index=self._pod.index,
            restarts=self._restarts,
            fault=self._fault,
            ready=bool(heard) and all(row.has_beaten for row in heard),
            ranks=beats,
            run=self._run_so_far(),
        )

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _rounds(self) -> Departure:
        patience: float | None = None
        while True:
            self._ranks.warm(self._stop)
            warm_at = time.monotonic()
            met = self._meeting.gather(patience, self._claim)
            if isinstance(met, Ending):
                return Departure(exit_code(met), last_word(met))
            patience = float(self._pod.spec.lifecycle.progress_deadline_seconds)
            departure = self._lived_through(met, self._way(warm_at))
            if departure is not None:
                return departure
            self._rest(self._meeting.before(met.number + 1))

    def _way(self, warm_at: float) -> Way:
        """How this launcher came to the round that begins now."""
        took, met_at = warm_at - self._since, time.monotonic()
        ending, imports = (0.0, took) if self._is_new else (took, 0.0)
        self._is_new = False
        return Way(ending, imports, met_at - warm_at, met_at)

    def _lived_through(self, met: Round, way: Way) -> Departure | None:
        self._start(met, way)
        seen = self._watch(met)
        if isinstance(seen, AllEnded):
            other = self._others_ended(met, seen)
            if other is None:
                return self._departure(seen)
            seen = other
        self._since = time.monotonic()
        self._is_gathering = True
        self._ranks.kill()
        departure = self._answer(met, seen)
        self._ranks.bury()
        return departure

    def _claim(self, number: int) -> None:
        """Take the run folder before anybody can write to it."""
        folder = self._pod.run_folder
        try:
            # Whose folder it is comes first: a claim of another job would end the run that is at work in it.
            take(folder, RunOwner(job=self._pod.job, uid=self._pod.uid))
            claim(folder, self._pod.attempt, number)
        except BadConfiguration as error:
            raise BadFolder(str(error)) from None
        except OSError as error:
            reason = f"the run folder {folder} cannot be written to: {error.strerror or error}"
            raise (BadFolder if error.errno in _LASTING else LostFolder)(reason) from None

    def _start(self, met: Round, way: Way) -> None:
        self._save_until, self._starved = None, kills_for_memory()
        said = None if self._board is None else self._board.run()
        self._board = Board(self._ranks.folder / f"round-{met.number}", self._pod.ranks_per_node, said)
        self._is_gathering = False
        self._ranks.start(
            [
                Rank(self._pod.first_rank + local, self._target, self._environment(met, local) | {START: way.as_text()})
                for local in range(self._pod.ranks_per_node)
            ]
        )

    def _environment(self, met: Round, local_rank: int) -> dict[str, str]:
        """What torch's env:// expects, under the names of its own launcher."""
        pod = self._pod
        return {
            "RANK": str(pod.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(pod.index),
            "WORLD_SIZE": str(pod.world),
            "LOCAL_WORLD_SIZE": str(pod.ranks_per_node),
            "GROUP_WORLD_SIZE": str(pod.nodes),
            "MASTER_ADDR": met.host,
            "MASTER_PORT": str(met.port),
            # Ranks join the launcher's store: a port that rank 0 had to find free first could be taken by then.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"{pod.uid}.{pod.attempt}",
            RESTART: str(met.number),
            BOARD: str(self._board.folder if self._board is not None else ""),
        }

    # --- watching -----------------------------------------------------------------------------------------------------

    def _watch(self, met: Round) -> _Seen:
        while True:
            self._ranks.wait(self._stop, _LOOK_SECONDS)
            seen = self._ended() or self._unheeded() or self._others(met) or self._hung()
            if seen is not None:
                return seen

    def _ended(self) -> Fault | AllEnded | None:
        exits = dict(self._ranks.exits)
        if any(is_failure(code) for code in exits.values()):
            return self._died(exits)
        if ExitCode.SAVED_AND_STOPPED in exits.values():
            # All ranks stop together, also where only another pod was asked to: the rest are saving.
            self._expect_saved()
        if self._ranks.pids:
            return None
        return AllEnded(max(exits.values()))

    def _died(self, exits: dict[int, int]) -> Fault | AllEnded:
        rank = blamed(exits)
        code = exits[rank]
        # Killed with its peers, so that nothing waits for the last lines to be read.
        self._ranks.kill()
        if self._stop.times and not self._anything_to_save():
            return AllEnded(ExitCode.SAVED_AND_STOPPED)
        cause = Cause.BAD_CONFIGURATION if code == ExitCode.BAD_CONFIGURATION else Cause.RANK_FAILED
        return Fault(cause, self._told_death(rank, code), rank, code, self._step())

    def _told_death(self, rank: int, code: int) -> str:
        """How a rank died, and what it said of it; one that was killed at once knew nothing of it."""
        if code == -signal.SIGKILL:
            is_starved = kills_for_memory() > self._starved
            return f"rank {rank} was killed by signal {-code}{_STARVED if is_starved else ''}"
        how = f"rank {rank} was killed by signal {-code}" if code < 0 else f"rank {rank} ended with exit code {code}"
        said = self._ranks.last_line(rank)
        return f"{how}: {said}" if said else how

    def _unheeded(self) -> Fault | None:
        """Pass a request to stop on to the ranks, once; a fault when they have not saved in time."""
        if self._stop.times and self._save_until is None:
            self._expect_saved()
            self._ranks.terminate()
        is_over = self._save_until is not None and time.monotonic() >= self._save_until
        if not is_over and self._stop.times < 2:
            return None
        ranks = sorted(self._ranks.pids)
        reason = "was asked to stop again" if not is_over else f"had {self._save_seconds():.0f} s"
        message = f"{_named(ranks)} had not saved when the pod {reason}"
        return Fault(Cause.RANK_FAILED, message, ranks[0] if ranks else None, None, self._step())

    def _others(self, met: Round) -> Ending | None:
        """An ending that came from another pod."""
        self._tell_checkpoint()
        return self._meeting.ending(met.number)

    def _hung(self) -> Fault | None:
        limit = self._pod.spec.lifecycle.progress_deadline_seconds
        heard = () if self._board is None or self._save_until is not None else self._board.heard()
        first, living = self._pod.first_rank, self._ranks.pids
        silent = [
            first + local for local, row in enumerate(heard) if row.age_seconds >= limit and first + local in living
        ]
        if not silent:
            return None
        return Fault(Cause.HUNG, f"{_named(silent)} silent for {limit} s", silent[0], None, self._step())

    # --- answering ----------------------------------------------------------------------------------------------------

    def _answer(self, met: Round, seen: Fault | Ending) -> Departure | None:
        if isinstance(seen, Ending):
            return self._follow(seen)
        leaves_anyway = seen.cause is Cause.BAD_CONFIGURATION or self._stop.times > 0
        try:
            mine, held = self._told(met, seen)
        except LostPeers:
            # Otherwise they are the better reason: ranks fail when their peers vanish.
            if not leaves_anyway:
                raise
            return Departure(exit_code(seen), last_word(seen))
        if held != mine and not leaves_anyway:
            return self._follow(held)
        log.warning("ranks have failed", cause=mine.cause.value, message=mine.message, in_place=mine.in_place)
        if mine.pod_leaves:
            return Departure(exit_code(mine), last_word(mine))
        self._restarts, self._fault = self._restarts + 1, rank_fault(mine)
        return None

    def _told(self, met: Round, fault: Fault) -> tuple[Ending, Ending]:
        """The ending that this pod wants, and the one that holds."""
        mine = ending_by(self._author(), fault, self._meeting.before(met.number))
        held = self._meeting.end(met.number, mine)
        if mine.is_final and held != mine:
            self._meeting.end_for_good(met.number, mine)
        return mine, held

    def _follow(self, ending: Ending) -> Departure | None:
        log.warning("another pod has ended the round", pod=ending.pod, cause=ending.cause.value, message=ending.message)
        # Saving is done by all together: what this pod was asked to save is lost.
        is_last = ending.is_final or self._stop.times > 0
        return Departure(exit_code(ending), last_word(ending)) if is_last else None

    def _rest(self, ended: Ending | None) -> None:
        """Wait before ranks are restarted: longer each time that it did not help."""
        until = time.monotonic() + (0.0 if ended is None else ended.delay_seconds)
        while (left := until - time.monotonic()) > 0:
            self._stop.check()
            self._stop.wait(left)

    # --- ending well --------------------------------------------------------------------------------------------------

    def _others_ended(self, met: Round, ended: AllEnded) -> Ending | None:
        """Stay until the ranks of all pods have ended: one that fails now needs all of them to start again."""
        if ended.exit_code == ExitCode.SAVED_AND_STOPPED:
            # Without pod 0 there is nobody to meet, and what was to be saved is saved.
            with suppress(LostPeers):
                return self._stopped_together(met)
            return None
        self._meeting.done(met.number)
        while not self._meeting.all_done(met.number):
            self._stop.wait(_LOOK_SECONDS)
            if self._stop.times:
                self._expect_saved()
            other = self._others(met)
            if other is not None and self._save_until is None:
                return other
            if self._save_until is not None and time.monotonic() >= self._save_until:
                return None
        self._meeting.leave(met.number, _LAST_TO_LEAVE_SECONDS)
        return None

    def _stopped_together(self, met: Round) -> Ending | None:
        """What follows when ranks have saved and stopped because some pod was asked to: that one goes, the others stay.

        Its replacement then finds launchers that need no imports. None when this pod goes, too.
        """
        self._meeting.done(met.number)
        ending: Ending | None = None
        while ending is None:
            if self._stop.times and not self._pod.is_first:
                break
            if self._pod.is_first and self._meeting.all_done(met.number):
                ending = self._meeting.end(met.number, ending_by_stop(self._author(), self._meeting.before(met.number)))
                continue
            if self._save_until is not None and time.monotonic() >= self._save_until:
                break
            self._stop.wait(_LOOK_SECONDS)
            ending = self._meeting.ending(met.number)
        if ending is not None and not ending.ends_gang:
            return ending
        self._meeting.leave(met.number, _LAST_TO_LEAVE_SECONDS)
        return None

    def _departure(self, ended: AllEnded) -> Departure:
        if ended.exit_code == ExitCode.DONE:
            return Departure(ended.exit_code, self._word(Outcome.COMPLETED, "all ranks are done"))
        return Departure(ended.exit_code, self._word(Outcome.PREEMPTED, "asked to stop, and stopped after saving"))

    # --- what is known ------------------------------------------------------------------------------------------------

    def _author(self) -> Author:
        self._tell_checkpoint()
        known = self._meeting.checkpoint()
        return Author(self._pod.index, self._meeting.token, known, is_stopping=self._stop.times > 0)

    def _tell_checkpoint(self) -> None:
        run = self._run_so_far()
        self._meeting.tell_checkpoint(None if run is None else run.last_checkpoint_step)

    def _expect_saved(self) -> None:
        if self._save_until is None:
            self._save_until = time.monotonic() + self._save_seconds()

    def _save_seconds(self) -> float:
        grace = self._pod.grace_seconds
        return grace - min(_MARGIN_SECONDS, _MARGIN_SHARE * grace)

    def _anything_to_save(self) -> bool:
        return self._board is not None and any(row.has_beaten for row in self._board.heard())

    def _run_so_far(self) -> RunProgress | None:
        return self._board.run() if self._board is not None and self._pod.is_first else None

    def _step(self) -> int | None:
        return None if self._board is None else max(row.step for row in self._board.heard())

    def _word(self, outcome: Outcome, message: str) -> LastWord:
        return LastWord(outcome=outcome, message=message[:2048], step=self._step())


def _named(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_RANKS_NAMED]) + (" ..." if len(ranks) > _RANKS_NAMED else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
