"""Programs of ranks in tests of the launcher. Each writes down how it was started before anything else."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from moejob_api.contract.pods import RunPhase, RunProgress
from moejob_trainer.runtime.fencing import Fence, FenceToken
from moejob_trainer.runtime.heartbeats import Heartbeat

RANK, RESTART = "RANK", "TORCHELASTIC_RESTART_COUNT"


def rank() -> int:
    return int(os.environ[RANK])


def restart() -> int:
    return int(os.environ[RESTART])


def folder() -> Path:
    return Path(os.environ["MOEJOB_RUN_FOLDER"])


def start(**more: object) -> Heartbeat:
    """Leave a note of how this rank was started, and send the first beat."""
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MOEJOB_ATTEMPT")
    note = {"pid": os.getpid(), "parent": os.getppid(), **{name: os.environ[name] for name in names}, **more}
    path = folder() / f"start-{restart()}-{rank()}.json"
    path.with_suffix(".new").write_text(json.dumps(note))
    path.with_suffix(".new").rename(path)
    heartbeat = Heartbeat.for_rank()
    heartbeat.beat(restart() * 10 + rank())
    return heartbeat


def for_ever() -> int:
    while True:
        signal.pause()


def work() -> int:
    start()
    return for_ever()


def finish() -> int:
    start()
    sys.stdout.write(f"hello from {rank()}\n")
    return 0


def finish_when_allowed() -> int:
    """Go well once the test says so."""
    start()
    wait_for(folder() / "go")
    return 0


def step_when_allowed() -> int:
    """Be in the first step until the test says that it is done."""
    heartbeat = start()
    heartbeat.enter_phase(RunPhase.FIRST_STEP)
    wait_for(folder() / "go")
    heartbeat.enter_phase(RunPhase.STEPPING)
    return for_ever()


def finish_when_restarted() -> int:
    start()
    return 0 if restart() else for_ever()


def refuse() -> int:
    start()
    wait_for_all()
    if rank() == 1:
        sys.stderr.write("data.train[0]: no such file\n")
        return 78
    return for_ever()


def end_with_255() -> int:
    start()
    wait_for_all()
    return for_ever() if rank() == 1 or restart() else 255


def fail() -> int:
    start()
    wait_for_all()
    if rank() == 1:
        raise ValueError("loss is not finite")
    return for_ever()


def fail_with_secrets() -> int:
    """Fail with the words of a library that could not log in."""
    start()
    sys.stderr.write(f"no access with {os.environ['MOEJOB_SECRET']} nor hf_abcdefghijklmnopqrstuvwxyz\n")
    raise ValueError("https://me:hunter2@example.com refused")


def fail_after_a_checkpoint() -> int:
    heartbeat = start()
    if rank() == 0:
        heartbeat.report_run(RunProgress(step=restart(), last_checkpoint_step=restart()))
        return for_ever()
    wait_for(folder() / f"go-{restart()}")
    return 1


def fall_silent() -> int:
    heartbeat = start()
    while rank() == 0 or restart():
        heartbeat.beat(1)
        time.sleep(0.05)
    return for_ever()


def finish_in_the_order_of_ranks() -> int:
    start()
    wait_for(folder() / f"go-{rank()}")
    return 0


def fail_at_the_end_elsewhere() -> int:
    start()
    if rank() == 0 or restart():
        return 0
    wait_for(folder() / "go-0")
    return 1


def fail_on_another_node() -> int:
    start()
    wait_for_all()
    return 1 if rank() == 2 else for_ever()


def beat_for_ever() -> int:
    heartbeat = start()
    while True:
        heartbeat.beat(1)
        time.sleep(0.05)


def refuse_on_another_node() -> int:
    start()
    if rank() != 3:
        return for_ever()
    wait_for(folder() / "go-0")
    return 78


def save_slowly() -> int:
    """Save for as long as the test's folder says, once asked to stop."""
    heartbeat = start()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    heartbeat.beat(7)
    (folder() / f"listening-{rank()}").touch()
    while not asked and not (folder() / "stop-all").exists():
        time.sleep(0.02)
    (folder() / "stop-all").touch()
    wait_for(folder() / "saved")
    return 143


def save_slowly_once() -> int:
    return save_slowly() if restart() == 0 else work()


def say_progress() -> int:
    heartbeat = start()
    heartbeat.beat(12)
    if rank() == 0:
        heartbeat.report_run(RunProgress(step=12, total_steps=100, loss=2.5, last_checkpoint_step=10))
    return for_ever()


def beat_when_told() -> int:
    wait_for(folder() / f"beat-{rank()}")
    return work()


def work_on_alone() -> int:
    """Rank 1 is done at once; rank 0 beats until it may end."""
    heartbeat = start()
    wait_for_all()
    while rank() == 0 and not (folder() / "go-0").exists():
        heartbeat.beat(1)
        time.sleep(0.02)
    return 0


def leave_strays() -> int:
    """Start a process that outlives this rank, in a session of its own; the second time, just be there."""
    if restart():
        return work()
    subprocess.run(["/bin/sh", "-c", f"setsid sleep 1000 & echo $! > {folder()}/stray"], check=True)
    return work()


def look_around() -> int:
    start(
        modules=[name for name in ("torch", "transformers") if name in sys.modules],
        session=os.getsid(0),
        collects=gc.isenabled(),
        spared=gc.get_freeze_count(),
        spins=os.environ.get("GOMP_SPINCOUNT"),
    )
    return 0


def hold_the_folder() -> int:
    token = FenceToken.of_rank()
    start(claim=str(token), ours=Fence.of_rank().is_ours(token))
    return for_ever()


def wait_for_all() -> None:
    for peer in range(int(os.environ["WORLD_SIZE"])):
        wait_for(folder() / f"start-{restart()}-{peer}.json")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)
