"""The processes of the ranks of this pod: started by a fork server with the imports done, watched, stopped, killed.

The fork server is a child of the launcher and the ranks are its children; each dies with its parent. Does not know why
a rank is stopped, nor what its variables say: RANK and MASTER_ADDR are written by agent.py. Must be used from one
thread: the kernel counts a thread's end as the parent's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from moejob_trainer.launcher.engine_processes import EngineRefusal, PodEngines
from moejob_trainer.launcher.entry import RankCommand, enter_rank
from moejob_trainer.launcher.log import LauncherLog
from moejob_trainer.launcher.options import Options
from moejob_trainer.launcher.orphans import Orphans
from moejob_trainer.launcher.output import RankOutput
from moejob_trainer.launcher.preload import PRELOADED, Preload
from moejob_trainer.launcher.ranks_store import RanksStore
from moejob_trainer.launcher.stacks import RankProcess, read_stacks
from moejob_trainer.launcher.stop import StopRequest

log = LauncherLog()

# A process that the kernel cannot end (stuck on a GPU or a dead volume) is not waited for longer than this.
_REAP_SECONDS = 20.0
# Exit code that multiprocessing gives to a process whose fork server is gone.
_UNSEEN = 255
# The kernel closes the files of a process before it calls it ended.
_DYING_SECONDS = 0.5
# A rank writes its stacks within milliseconds, or is stopped and never will.
_STACKS_SECONDS = 1.0


class RankProcesses:
    """The ranks of one pod, round after round."""

    def __init__(self, folder: Path, options: Options, engines: PodEngines) -> None:
        self._engines, self._logs, self.folder = engines, options.logs, folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([PRELOADED])
        self._preload = Preload(folder / "warm", options.preload, options.idle_import_seconds)
        self._orphans = Orphans(lambda: self._engines.pids)
        self._store = RanksStore(self._context)
        self._processes: dict[int, ForkServerProcess] = {}
        self._output: RankOutput | None = None
        # Of the last start, also once its ranks are reaped.
        self._last_output: RankOutput | None = None
        self._pids: Mapping[int, int] = {}
        self._exits: Mapping[int, int] = {}

    def wait_for_imports(self, stop: StopRequest) -> None:
        """Wait until the imports are done: a launcher that arrives at the rendezvous must be able to start at once."""
        self._preload.wait(stop)

    def open_store(self) -> int:
        """Open a new store for the ranks of all pods, in place of the one before; its port."""
        with self._preload.expect_answer():
            return self._store.open_new_store()

    def start(self, ranks: Sequence[RankCommand]) -> None:
        """Start all ranks of a round."""
        self._orphans = Orphans(lambda: self._engines.pids)
        readers, writers = {}, []
        for rank in ranks:
            output, output_end = self._context.Pipe(duplex=False)
            errors, errors_end = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=enter_rank, args=(rank, output_end, errors_end), name=f"rank-{rank.number}"
            )
            with self._preload.expect_answer():
                process.start()
            self._processes[rank.number] = process
            readers[rank.number] = (output, errors)
            writers += [output_end, errors_end]
        for writer in writers:
            writer.close()
        self._output = self._last_output = RankOutput(readers, self._logs)
        self._poll()
        log.info("ranks started", ranks=[rank.number for rank in ranks], pids=list(self._pids.values()))

    @property
    def pids(self) -> Mapping[int, int]:
        """The living ranks, as of the last look. May be read from any thread."""
        return self._pids

    @property
    def exits(self) -> Mapping[int, int]:
        """The exit codes of ranks, as of the last poll; a negative code is a signal."""
        return self._exits

    def wait(self, stop: StopRequest, seconds: float) -> None:
        """Wait until a rank ends, a signal comes, or that long."""
        stop.wait(seconds, [self._processes[rank].sentinel for rank in self._pids])
        self._engines.keep_running()
        self._orphans.reap()
        self._poll()

    @property
    def engine_ends(self) -> Mapping[int, int]:
        """The ends of each engine of the pod since the last step. May be read from any thread."""
        return self._engines.engine_ends

    def forget_engine_ends(self) -> None:
        """Forget the ends of engines: ranks make steps."""
        self._engines.forget_ends()

    def find_engine_refusal(self) -> EngineRefusal | None:
        """Return the reason that an engine beside the ranks cannot start, once it is known."""
        return self._engines.find_refusal()

    def has_lost_store(self) -> bool:
        """Return whether the ranks' store has ended before the ranks."""
        return self._store.has_ended()

    def last_line(self, rank: int) -> str:
        """Return the last line that a rank wrote to standard error."""
        return "" if self._output is None else self._output.last_line(rank)

    def read_tail(self, rank: int) -> Sequence[str]:
        """Return the last lines of a rank of the last start."""
        return () if self._last_output is None else self._last_output.read_tail(rank)

    def dump_stacks(self) -> None:
        """Take the stacks of every living rank into its log and its last lines."""
        if self._output is None:
            return
        processes = filter(None, map(RankProcess.find_rank, self._pids.values()))
        for stacks in read_stacks(processes, _STACKS_SECONDS):
            self._output.add_lines(stacks.rank, stacks.lines or [f"no stacks: {stacks.problem}"])

    def terminate(self) -> None:
        """Ask every rank to save and stop; its own children are its to stop."""
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the ranks and what they have started, without waiting. Peers of a dead rank hang in a collective."""
        for process in self._processes.values():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    process.kill()

    def reap(self) -> None:
        """Wait for what was killed, and forget it."""
        until = time.monotonic() + _REAP_SECONDS
        for rank, process in self._processes.items():
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                log.warning("a rank cannot be killed; its node may need a restart", rank=rank, pid=process.pid)
        if self._output is not None:
            self._output.read_to_end()
        self._output, self._processes = None, {}
        self._poll()
        self._orphans.kill()

    def close(self) -> None:
        """End the fork server, once no rank is left."""
        self._preload.close()

    def _is_server_gone(self) -> bool:
        until, pid = time.monotonic() + _DYING_SECONDS, self._preload.server_pid
        while time.monotonic() < until:
            # WNOWAIT leaves the end of the server to ensure_running, which starts it again.
            with suppress(ChildProcessError):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    time.sleep(0.01)
                    continue
            return True
        return False

    def _poll(self) -> None:
        # An exit code may be asked for by one thread only: it is read from a pipe.
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        if _UNSEEN in codes.values() and self._is_server_gone():
            # Their exit codes are unknown, but a rank that outlives the server is killed with it.
            codes = {rank: -signal.SIGKILL if code == _UNSEEN else code for rank, code in codes.items()}
        self._exits = {rank: code for rank, code in codes.items() if code is not None}
        self._pids = {rank: self._processes[rank].pid or 0 for rank, code in codes.items() if code is None}
