"""The launcher's loop: meet the other pods, start the ranks, watch them, and report how they end.

Rounds follow each other until this launcher exits. ending.py decides what an ending means, rendezvous.py agrees who may
start; here is only the order of the steps. Ranks are killed before other pods hear of a failure: peers of a dead rank
wait in a collective, and every second of that is lost.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moejob_api.contract.pods import (
    ExitCode,
    PodOutcome,
    PodProgress,
    RankFault,
    ReportedHeartbeat,
    RunOwner,
    RunPhase,
    RunProgress,
    StatusMeasure,
    TerminationMessage,
    engine_ends_text,
    phase_text,
)
from moejob_api.contract.torchrun import TorchrunVariable
from moejob_api.recovery.restarts import FailureCause
from moejob_trainer.checkpoints import acquire_run_folder
from moejob_trainer.errors import BadConfiguration, Superseded
from moejob_trainer.launcher.ending import (
    FAILED,
    Ending,
    ExitReport,
    FailureOrigin,
    Fault,
    blamed_rank,
    build_termination,
    ending_by_fault,
    ending_by_stop,
    ending_without_pod,
    is_failure,
    launcher_exit_code,
    rank_fault,
)
from moejob_trainer.launcher.entry import RankCommand
from moejob_trainer.launcher.log import LauncherLog
from moejob_trainer.launcher.memory import count_memory_kills
from moejob_trainer.launcher.options import Options
from moejob_trainer.launcher.pod import TrainerPod
from moejob_trainer.launcher.preload import LostForkServer
from moejob_trainer.launcher.rank_processes import RankProcesses
from moejob_trainer.launcher.record import LauncherRecord
from moejob_trainer.launcher.rendezvous import Rendezvous, Round, poll_seconds
from moejob_trainer.launcher.round_record import RoundRecord, needs_stacks
from moejob_trainer.launcher.stop import StopRequest, StopRequested
from moejob_trainer.launcher.store import LostPeers, LostStore
from moejob_trainer.runtime.environment import STORE_PORT
from moejob_trainer.runtime.fencing import RESTART, FenceToken
from moejob_trainer.runtime.heartbeats import BOARD, HeartbeatBoard, RankHeartbeat
from moejob_trainer.runtime.start_timing import START, LauncherTiming

log = LauncherLog()

_POLL_SECONDS = 0.2
# Between two looks for an ending from another pod, while ranks train: a launcher of two takes 0.7 % of a core, as at
# 0.2 s; at 0.05 s it takes 1.3 %.
_WATCH_SECONDS = 0.1
# Left of the grace period for the termination message once the ranks have saved.
_MARGIN_SECONDS, _MARGIN_SHARE = 5.0, 0.2
_LAST_TO_LEAVE_SECONDS = 5.0
_RANKS_NAMED = 8
_FILES_NAMED = 4
_STARVED = ", out of memory; raise resources.memory"
# Not EROFS: a kernel mounts a file system read-only when its disk fails, and another node may write.
_LASTING = (errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class AllRanksEnded:
    """Every rank of this pod has ended well: with 0, or with 143 after saving."""

    exit_code: int


_PHASES = tuple(RunPhase)

# Result of watching a round; an Ending comes from another pod.
_RoundResult = Fault | Ending | AllRanksEnded


class BadRunFolder(Exception):
    """The run folder cannot be used; a retry would find the same."""


class LostRunFolder(Exception):
    """The run folder cannot be used now."""


class Agent:
    """One launcher. `run` may be called once."""

    def __init__(
        self, pod: TrainerPod, options: Options, stop: StopRequest, ranks: RankProcesses, record: LauncherRecord
    ) -> None:
        # The pod in the place that it has, which a spare gets with the place of a lost pod.
        self._pod, self._index = pod, pod.index
        self._target, self._stop, self._ranks = options.target, stop, ranks
        self._record = RoundRecord(record, pod, ranks)
        self._rendezvous = Rendezvous(pod, stop, options.lost_seconds)
        self._board: HeartbeatBoard | None = None
        self._fence_token: FenceToken | None = None
        self._restarts = 0
        self._fault: RankFault | None = None
        # Kills for memory in this container before the present round.
        self._kills_before = 0
        self._is_gathering, self._is_done = True, False
        self._launcher_phase, self._launcher_phase_at = RunPhase.IMPORTING, options.began_at
        # When the way to the next round began: with this process, later with the end of a round.
        self._gap_began_at, self._is_new = options.began_at, True
        # When the ranks that were asked to save are killed.
        self._save_until: float | None = None

    def run(self) -> ExitReport:
        """Run rounds until the job is done or this pod cannot continue."""
        self._record.add_start()
        report = self._run_until_exit()
        self._record.add_end(report)
        # The last reply of /progress was about an earlier step.
        fields = {"run": self._reported_run(), "restarts": self._restarts, "fault": self._fault}
        return replace(report, termination=report.termination.model_copy(update=fields))

    def _run_until_exit(self) -> ExitReport:
        try:
            # A spare may host the store since an earlier pod 0 was lost: then this pod is a spare.
            if self._pod.is_first and not self._rendezvous.join_store_before_hosting():
                self._rendezvous.host_store(self._take_over())
            return self._run_rounds()
        except StopRequested:
            return ExitReport(
                ExitCode.SAVED_AND_STOPPED,
                self._build_termination(PodOutcome.PREEMPTED, "stopped; nothing was unsaved"),
            )
        except (LostPeers, Superseded) as error:
            return ExitReport(FAILED, self._build_termination(PodOutcome.LOST_PEERS, str(error)))
        except (LostRunFolder, LostForkServer) as error:
            return ExitReport(FAILED, self._build_termination(PodOutcome.RANK_FAILED, str(error)))
        except BadRunFolder as error:
            return ExitReport(
                ExitCode.BAD_CONFIGURATION, self._build_termination(PodOutcome.BAD_CONFIGURATION, str(error))
            )
        finally:
            self._ranks.kill()
            self._ranks.reap()
            self._record.add_last_lines()

    def read_progress(self) -> PodProgress:
        """Return the progress of the pod. Called from other threads."""
        board, pids, first = self._board, self._ranks.pids, self._pod.first_rank
        heartbeats = () if board is None or self._is_gathering else board.read()
        rank_heartbeats = tuple(
            ReportedHeartbeat(rank=first + local, pid=pids[first + local], step=row.step, age_seconds=row.age_seconds)
            for local, row in enumerate(heartbeats)
            if first + local in pids
        )
        phase, phase_seconds, share = self._slowest_phase(heartbeats)
        return PodProgress(
            attempt=self._pod.attempt,
            index=self._index,
            restarts=self._restarts,
            fault=self._fault,
            ready=bool(heartbeats) and all(row.has_beaten for row in heartbeats),
            ranks=rank_heartbeats,
            run=self._run_so_far(),
            phase=None if phase is None else self._phase_text(phase, share),
            phase_seconds=phase_seconds,
        )

    def _slowest_phase(self, heartbeats: Sequence[RankHeartbeat]) -> tuple[RunPhase | None, float | None, float | None]:
        """Return phase, duration and share of the rank that is furthest behind; without ranks, the launcher's."""
        if self._is_gathering:
            if self._rendezvous.is_spare and self._launcher_phase is RunPhase.AWAITING_PODS:
                return RunPhase.SPARE, time.monotonic() - self._launcher_phase_at, None
            return self._launcher_phase, time.monotonic() - self._launcher_phase_at, None
        phases = [row for row in heartbeats if row.phase is not None]
        if len(phases) < len(heartbeats) or not phases:
            return None, None, None
        slowest = min(phases, key=_phase_rank)
        return slowest.phase, slowest.phase_seconds, slowest.phase_share

    def _phase_text(self, phase: RunPhase, share: float | None) -> str:
        """Return the phase as it is reported: ranks whose engines end in the first step wait for these."""
        awaits_engines = phase in (RunPhase.AWAITING_ENGINES, RunPhase.FIRST_STEP)
        ends = engine_ends_text(self._ranks.engine_ends) if awaits_engines else ""
        return f"{RunPhase.AWAITING_ENGINES}: {ends}" if ends else phase_text(phase, share)

    def _enter_phase(self, phase: RunPhase) -> None:
        self._launcher_phase, self._launcher_phase_at = phase, time.monotonic()

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _run_rounds(self) -> ExitReport:
        while True:
            try:
                report = self._run_next_round()
            except LostStore as loss:
                self._leave_store(loss)
                continue
            if report is not None:
                return report

    def _run_next_round(self) -> ExitReport | None:
        self._ranks.wait_for_imports(self._stop)
        preloaded_at = time.monotonic()
        self._enter_phase(RunPhase.AWAITING_PODS)
        # Before the first round pods come when the cluster has room for them.
        patience = None if self._board is None else float(self._pod.spec.lifecycle.progress_deadline_seconds)
        current = self._rendezvous.gather_pods(patience, self._prepare_round)
        if isinstance(current, Ending):
            return ExitReport(launcher_exit_code(current), build_termination(current))
        report = self._run_round(current, self._timing_of_place(current, preloaded_at))
        if report is None:
            self._back_off(self._rendezvous.ending_before(current.number + 1))
        return report

    def _leave_store(self, loss: LostStore) -> None:
        """End the ranks of a round whose store is lost: the next pod 0 or a spare hosts another.

        A pod whose ranks are all done does not wait: the host may have ended well, and then none comes after it.
        """
        if self._rendezvous.is_host or self._stop.times or self._is_done:
            raise loss
        log.warning("the store is lost; this pod joins the next one", reason=str(loss))
        self._fence_token = None
        self._ranks.kill()
        if not self._is_gathering:
            self._is_gathering, self._gap_began_at = True, time.monotonic()
            origin = FailureOrigin(self._pod.index, self._rendezvous.token)
            self._record.add_result(ending_without_pod(0, origin, str(loss), None))
        self._ranks.reap()
        self._record.add_last_lines()
        self._rendezvous.leave_store()

    def _timing_of_place(self, current: Round, preloaded_at: float) -> LauncherTiming:
        """Become the pod of the round's place. The time as a spare is no part of a start."""
        if current.place != self._pod.index:
            self._pod = self._pod.with_place(current.place)
            self._record.take_place(self._pod)
        if self._rendezvous.place_taken_at > preloaded_at:
            self._gap_began_at = preloaded_at = self._rendezvous.place_taken_at
        return self._launcher_timing(preloaded_at)

    def _launcher_timing(self, preloaded_at: float) -> LauncherTiming:
        """Return this launcher's part of the start timing of the round that begins now."""
        elapsed, met_at = preloaded_at - self._gap_began_at, time.monotonic()
        ending, imports = (0.0, elapsed) if self._is_new else (elapsed, 0.0)
        self._is_new = False
        return LauncherTiming(ending, imports, met_at - preloaded_at, met_at)

    def _run_round(self, current: Round, timing: LauncherTiming) -> ExitReport | None:
        self._start_ranks(current, timing)
        self._record.add_round(current.number, timing)
        result = self._watch_ranks(current)
        if isinstance(result, AllRanksEnded):
            peer_ending = self._await_peers(current, result)
            if peer_ending is None:
                return self._exit_report(result)
            result = peer_ending
        self._gap_began_at = time.monotonic()
        self._enter_phase(RunPhase.IMPORTING)
        self._is_gathering, self._is_done = True, False
        if needs_stacks(result):
            self._ranks.dump_stacks()
        self._ranks.kill()
        self._record.add_result(result)
        report = self._handle_result(current, result)
        self._ranks.reap()
        self._record.add_last_lines()
        return report

    def _take_over(self) -> int:
        """Take the run folder from an earlier pod 0 of this attempt; return the number of the first round.

        Before any pod is met: ranks that others still run with the earlier pod 0 commit nothing from here on, and its
        launcher starts none again.
        """
        try:
            newest = self._pod.fence.newest_token_of(self._pod.attempt)
        except OSError:
            # The first round takes the folder, and then says what is wrong with it.
            return 0
        if newest is None:
            return 0
        self._take_run_folder(newest.restart + 1)
        return newest.restart + 2

    def _prepare_round(self, number: int) -> int:
        """Prepare a round before any rank of it can start; the port of its ranks' store."""
        self._take_run_folder(number)
        # Pods may come hours apart, and the fork server may have ended while this pod waited.
        self._ranks.wait_for_imports(self._stop)
        return self._ranks.open_store()

    def _take_run_folder(self, number: int) -> None:
        """Take the run folder before any rank can write to it."""
        folder = self._pod.run_folder
        try:
            # The owner is checked first: a token of this job would end another job's run in that folder.
            acquire_run_folder(folder, RunOwner(job=self._pod.job, uid=self._pod.uid))
            foreign = self._pod.fence.foreign_names()
            self._fence_token = self._pod.fence.acquire(self._pod.attempt, number, self._fence_token)
        except BadConfiguration as error:
            raise BadRunFolder(str(error)) from None
        except OSError as error:
            reason = f"the run folder {folder} cannot be written to: {error.strerror or error}"
            raise (BadRunFolder if error.errno in _LASTING else LostRunFolder)(reason) from None
        if foreign:
            shown_names = [*foreign[:_FILES_NAMED], *(["..."] if len(foreign) > _FILES_NAMED else [])]
            log.warning(
                "claims that are not proven to be this job's are ignored", folder=str(folder), claims=shown_names
            )

    def _start_ranks(self, current: Round, timing: LauncherTiming) -> None:
        self._save_until, self._kills_before = None, count_memory_kills()
        progress = None if self._board is None else self._board.read_run()
        self._board = HeartbeatBoard(self._ranks.folder / f"round-{current.number}", self._pod.ranks_per_node, progress)
        self._is_gathering = self._is_done = False
        self._ranks.wait_for_imports(self._stop)
        self._ranks.start(
            [
                RankCommand(
                    self._pod.first_rank + local,
                    self._target,
                    self._rank_variables(current, local) | {START: timing.as_text()},
                )
                for local in range(self._pod.ranks_per_node)
            ]
        )

    def _rank_variables(self, current: Round, local_rank: int) -> dict[str, str]:
        """Return the variables of a rank, under the names of torchrun. MASTER_PORT is that of the pod."""
        pod = self._pod
        return {
            "RANK": str(pod.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(pod.index),
            "WORLD_SIZE": str(pod.world_size),
            "LOCAL_WORLD_SIZE": str(pod.ranks_per_node),
            "GROUP_WORLD_SIZE": str(pod.nodes),
            # The variable of a spare's pod has another number.
            **({TorchrunVariable.PET_NODE_RANK.value: str(pod.index)} if pod.spare_hosts else {}),
            "MASTER_ADDR": current.master,
            # At MASTER_ADDR a rank 0 that asks for it opens a store of its own; the launcher's is elsewhere.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            STORE_PORT: str(current.port),
            "TORCHELASTIC_RUN_ID": f"{pod.uid}.{pod.attempt}",
            RESTART: str(current.number),
            BOARD: str(self._board.folder if self._board is not None else ""),
        }

    # --- watching -----------------------------------------------------------------------------------------------------

    def _watch_ranks(self, current: Round) -> _RoundResult:
        pause = poll_seconds(self._pod.nodes, _WATCH_SECONDS) if self._pod.nodes > 1 else _POLL_SECONDS
        while True:
            self._ranks.wait(self._stop, pause)
            self._record_progress()
            result = (
                self._check_exits()
                or self._overdue_stop()
                or self._ending_from_peers(current)
                or self._find_hung_rank()
            )
            result = result or self._find_refused_engine() or self._find_lost_store()
            if result is not None:
                return result

    def _record_progress(self) -> None:
        if self._stop.times:
            self._record.add_stop_request(self._latest_step())
        if self._board is None:
            return
        phase, _, _ = self._slowest_phase(self._board.read())
        if phase is RunPhase.STEPPING:
            self._ranks.forget_engine_ends()
        if self._pod.is_first:
            self._record.add_phase(phase)

    def _check_exits(self) -> Fault | AllRanksEnded | None:
        exits = dict(self._ranks.exits)
        if any(is_failure(code) for code in exits.values()):
            return self._handle_death(exits)
        if ExitCode.SAVED_AND_STOPPED in exits.values():
            # All ranks stop together, also where only another pod was asked to stop: the others are saving.
            self._expect_saved()
        if self._ranks.pids:
            return None
        return AllRanksEnded(max(exits.values()))

    def _handle_death(self, exits: dict[int, int]) -> Fault | AllRanksEnded:
        rank = blamed_rank(exits)
        code = exits[rank]
        # Killed with its peers, so that nothing waits for the last lines to be read.
        self._ranks.kill()
        if self._stop.times and not self._has_state_to_save():
            return AllRanksEnded(ExitCode.SAVED_AND_STOPPED)
        cause = FailureCause.BAD_CONFIGURATION if code == ExitCode.BAD_CONFIGURATION else FailureCause.RANK_FAILED
        return Fault(cause, self._death_message(rank, code), rank, code, self._latest_step())

    def _death_message(self, rank: int, code: int) -> str:
        """Describe the end of a rank, with its last line; a rank killed at once could not write a line."""
        if code == -signal.SIGKILL:
            is_starved = count_memory_kills() > self._kills_before
            return f"rank {rank} was killed by signal {-code}{_STARVED if is_starved else ''}"
        description = (
            f"rank {rank} was killed by signal {-code}" if code < 0 else f"rank {rank} ended with exit code {code}"
        )
        last_line = self._ranks.last_line(rank)
        if last_line and code == ExitCode.BAD_CONFIGURATION:
            # The job's author needs the sentence alone; the fault has the rank in a field.
            return last_line
        return f"{description}: {last_line}" if last_line else description

    def _overdue_stop(self) -> Fault | None:
        """Pass a request to stop on to the ranks, once; a fault when they have not saved in time."""
        if self._stop.times and self._save_until is None:
            self._expect_saved()
            self._ranks.terminate()
        is_over = self._save_until is not None and time.monotonic() >= self._save_until
        if not is_over and self._stop.times < 2:
            return None
        ranks = sorted(self._ranks.pids)
        reason = "was asked to stop again" if not is_over else f"had {self._save_seconds():.0f} s"
        message = f"{_ranks_text(ranks)} had not saved when the pod {reason}"
        blamed_rank = ranks[0] if ranks else None
        return Fault(FailureCause.RANK_FAILED, message, blamed_rank, None, self._latest_step(), was_asked_to_save=True)

    def _ending_from_peers(self, current: Round) -> Ending | None:
        """An ending that came from another pod."""
        self._publish_checkpoint()
        return self._rendezvous.find_ending(current.number)

    def _find_hung_rank(self) -> Fault | None:
        limit = self._pod.spec.lifecycle.progress_deadline_seconds
        heartbeats = () if self._board is None or self._save_until is not None else self._board.read()
        first, living = self._pod.first_rank, self._ranks.pids
        silent = [
            first + local
            for local, row in enumerate(heartbeats)
            if row.age_seconds >= limit and first + local in living
        ]
        if not silent:
            return None
        return Fault(
            FailureCause.HUNG, f"{_ranks_text(silent)} silent for {limit} s", silent[0], None, self._latest_step()
        )

    def _find_refused_engine(self) -> Fault | None:
        """Return a fault when an engine cannot start: ranks alone would wait for it for long."""
        refusal = self._ranks.find_engine_refusal()
        if refusal is None:
            return None
        cause = FailureCause.BAD_CONFIGURATION if refusal.is_misconfigured else FailureCause.RANK_FAILED
        return Fault(cause, refusal.message, None, None, self._latest_step())

    def _find_lost_store(self) -> Fault | None:
        if not self._ranks.has_lost_store():
            return None
        return Fault(
            FailureCause.RANK_FAILED, "the store in which ranks meet has ended", None, None, self._latest_step()
        )

    # --- answering ----------------------------------------------------------------------------------------------------

    def _handle_result(self, current: Round, result: Fault | Ending) -> ExitReport | None:
        if isinstance(result, Ending):
            return self._follow_ending(result)
        leaves_anyway = result.cause is FailureCause.BAD_CONFIGURATION or self._stop.times > 0
        try:
            my_ending, round_ending = self._end_round(current, result)
        except LostPeers:
            # Lost peers are the better reason otherwise: ranks fail when their peers vanish.
            if not leaves_anyway:
                raise
            return ExitReport(launcher_exit_code(result), build_termination(result))
        if round_ending != my_ending and not leaves_anyway:
            return self._follow_ending(round_ending)
        log.warning(
            "ranks have failed", cause=my_ending.cause.value, message=my_ending.message, in_place=my_ending.in_place
        )
        if my_ending.pod_leaves:
            return ExitReport(launcher_exit_code(my_ending), build_termination(my_ending))
        self._restarts, self._fault = self._restarts + 1, rank_fault(my_ending)
        self._record.add_restart(my_ending)
        return None

    def _end_round(self, current: Round, fault: Fault) -> tuple[Ending, Ending]:
        """The ending that this pod proposes, and the ending that all pods follow."""
        my_ending = ending_by_fault(self._failure_origin(), fault, self._rendezvous.ending_before(current.number))
        round_ending = self._rendezvous.end_round(current.number, my_ending)
        if my_ending.is_final and round_ending != my_ending:
            self._rendezvous.end_for_good(current.number, my_ending)
        return my_ending, round_ending

    def _follow_ending(self, ending: Ending) -> ExitReport | None:
        log.warning("another pod has ended the round", pod=ending.pod, cause=ending.cause.value, message=ending.message)
        # Only all pods together can save: a save that this pod was asked for is lost.
        is_last = ending.is_final or self._stop.times > 0
        return ExitReport(launcher_exit_code(ending), build_termination(ending)) if is_last else None

    def _back_off(self, ending: Ending | None) -> None:
        """Wait before ranks are restarted: longer each time that it did not help."""
        until = time.monotonic() + (0.0 if ending is None else ending.delay_seconds)
        while (seconds_left := until - time.monotonic()) > 0:
            self._stop.raise_if_requested()
            self._stop.wait(seconds_left)

    # --- ending well --------------------------------------------------------------------------------------------------

    def _await_peers(self, current: Round, result: AllRanksEnded) -> Ending | None:
        """Stay until the ranks of all pods have ended: after a failure now, all of them have to start again."""
        if result.exit_code == ExitCode.SAVED_AND_STOPPED:
            try:
                return self._end_stopped_round(current)
            except LostPeers:
                # Without a host there is no rendezvous until the next one comes, and the state is saved.
                if self._stop.times or self._pod.is_first:
                    return None
                raise
        self._is_done = True
        self._rendezvous.mark_done(current.number)
        while not self._rendezvous.are_all_done(current.number):
            self._stop.wait(_POLL_SECONDS)
            if self._stop.times:
                self._expect_saved()
            peer_ending = self._ending_from_peers(current)
            if peer_ending is not None and self._save_until is None:
                return peer_ending
            if self._save_until is not None and time.monotonic() >= self._save_until:
                return None
        self._rendezvous.leave_round(current.number, _LAST_TO_LEAVE_SECONDS)
        return None

    def _end_stopped_round(self, current: Round) -> Ending | None:
        """Return the ending after all ranks saved because one pod was asked to stop: that pod goes, the others stay.

        The new pod then finds launchers that need no imports. None when this pod goes, too.
        """
        self._rendezvous.mark_done(current.number)
        ending: Ending | None = None
        while ending is None:
            if self._stop.times and not self._pod.is_first:
                break
            if self._pod.is_first and self._rendezvous.are_all_done(current.number):
                ending = self._rendezvous.end_round(
                    current.number,
                    ending_by_stop(self._failure_origin(), self._rendezvous.ending_before(current.number)),
                )
                continue
            if self._save_until is not None and time.monotonic() >= self._save_until:
                break
            self._stop.wait(_POLL_SECONDS)
            ending = self._rendezvous.find_ending(current.number)
        if ending is None or ending.is_end_of_first_pod:
            self._rendezvous.leave_round(current.number, _LAST_TO_LEAVE_SECONDS)
        return None if self._stop.times else ending

    def _exit_report(self, result: AllRanksEnded) -> ExitReport:
        if result.exit_code == ExitCode.DONE:
            run = self._run_so_far()
            early_stop_note = (
                "; the run stopped early" if run is not None and StatusMeasure.STOPPED_EARLY in run.measures else ""
            )
            return ExitReport(
                result.exit_code, self._build_termination(PodOutcome.COMPLETED, f"all ranks are done{early_stop_note}")
            )
        return ExitReport(
            result.exit_code, self._build_termination(PodOutcome.PREEMPTED, "asked to stop, and stopped after saving")
        )

    # --- what is known ------------------------------------------------------------------------------------------------

    def _failure_origin(self) -> FailureOrigin:
        self._publish_checkpoint()
        checkpoint_step = self._rendezvous.newest_checkpoint()
        return FailureOrigin(self._pod.index, self._rendezvous.token, checkpoint_step, is_stopping=self._stop.times > 0)

    def _publish_checkpoint(self) -> None:
        run = self._run_so_far()
        self._rendezvous.publish_checkpoint(None if run is None else run.last_checkpoint_step)

    def _expect_saved(self) -> None:
        if self._save_until is None:
            self._save_until = time.monotonic() + self._save_seconds()

    def _save_seconds(self) -> float:
        grace = self._pod.grace_seconds
        return grace - min(_MARGIN_SECONDS, _MARGIN_SHARE * grace)

    def _has_state_to_save(self) -> bool:
        return self._board is not None and any(row.has_beaten for row in self._board.read())

    def _run_so_far(self) -> RunProgress | None:
        return self._board.read_run() if self._board is not None and self._rendezvous.is_host else None

    def _reported_run(self) -> RunProgress | None:
        """Return the run with only the measures that a status needs: a termination message has little room."""
        run = self._run_so_far()
        if run is None:
            return None
        needed = {name.value: run.measures[name] for name in StatusMeasure if name in run.measures}
        return run.model_copy(update={"measures": needed})

    def _latest_step(self) -> int | None:
        return None if self._board is None else max(row.step for row in self._board.read())

    def _build_termination(self, outcome: PodOutcome, message: str) -> TerminationMessage:
        return TerminationMessage(outcome=outcome, message=message[:2048], step=self._latest_step())


def _phase_rank(row: RankHeartbeat) -> tuple[int, float]:
    """Return the order of ranks by how far they are; a rank that reports no share waits for those that do."""
    share = 1.0 if row.phase_share is None else row.phase_share
    return _PHASES.index(row.phase or RunPhase.IMPORTING), share


def _ranks_text(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_RANKS_NAMED]) + (" ..." if len(ranks) > _RANKS_NAMED else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
