"""The state of an objective in the checkpoints of a run: one moment, written beside the training, read on rank 0."""

from __future__ import annotations

import errno
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejob_api.job.parallelism import Parallelism
from moejob_api.job.storage import Checkpoint, ResumeMode
from moejob_api.layout.sizes import derive_layout
from moejob_trainer import checkpoints
from moejob_trainer.checkpoints import CheckpointStore, Coordinator, PendingWrite, SingleRank
from moejob_trainer.checkpoints.adapter_compatibility import AdapterFacts
from moejob_trainer.checkpoints.saving import RunCheckpoints, RunWriter, StateFacts
from moejob_trainer.distributed.encoding import Array
from moejob_trainer.errors import BadConfiguration, BadData
from moejob_trainer.evaluation.ranking import EvaluationScore
from moejob_trainer.loop import TrainingRun, run_training_loop
from moejob_trainer.objectives import ObjectiveState
from moejob_trainer.runtime.disk import Disk
from moejob_trainer.runtime.heartbeats import BOARD, Heartbeat, HeartbeatBoard, ShareReport, ignore_share
from moejob_trainer.training import LossTerms, MicroBatch, TokenOutputs, TrainingEngine, UpdateResult
from trainer.checkpoints.stand_ins import InlineExecutor, StandInWriting, ThreadCoordinators, flip_bit, make_run_folder

ARRAYS = "objective-state.safetensors"
GROUPS: Mapping[str, Array] = {
    "group.number": np.array([4, 2**62]),
    "answer.reward": np.array([np.nan, -0.0, 1.5]),
    "routing.1": np.arange(24, dtype=np.uint8).reshape(4, 3, 2)[:, ::2],
    "routing.2": np.zeros((0, 3, 2), np.uint16),
    "token.logProbability": np.array([-0.5], np.float32),
}


@dataclass
class Groups:
    """An objective with JSON and arrays, which remembers what it resumed from."""

    entries: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    snapshots: int = 0
    loaded: list[ObjectiveState] = field(default_factory=list)
    refusal: Exception | None = None

    def updates(self, step: int, engine: TrainingEngine) -> Iterable[Sequence[MicroBatch]]:
        raise NotImplementedError

    def loss(self, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
        raise NotImplementedError

    def snapshot_state(self) -> ObjectiveState:
        self.snapshots += 1
        return ObjectiveState(self.entries, self.arrays)

    def load_state(self, state: ObjectiveState) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.loaded.append(state)


@dataclass
class Tensors:
    """The state of a model: a file of each rank."""

    rank: int = 0
    # Whether a save asks once more before it is finished.
    questions: int = 0
    weights_only: list[bool] = field(default_factory=list)

    def prepare(self) -> None: ...

    def start_writing(self, folder: Path) -> PendingWrite:
        name = f"rank-{self.rank}.distcp"
        Disk().write(folder / name, b"weights")
        return StandInWriting([name], self.questions)

    def read(self, folder: Path, *, weights_only: bool, report_share: ShareReport = ignore_share) -> None:
        assert folder.is_dir()
        report_share(1, 1)
        self.weights_only.append(weights_only)

    def leave_published(self) -> None: ...

    def counters(self) -> Mapping[str, int]:
        return {"updates": 1}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        assert counters == {"updates": 1}


class NoEvaluations:
    """A run that evaluates nothing."""

    measure = ""

    def kept_score(self, step: int) -> EvaluationScore | None:  # noqa: ARG002
        return None

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SmallDisk(Disk):
    """A volume that says how many bytes are free."""

    def __init__(self, free_bytes: int) -> None:
        self.free = free_bytes

    def free_bytes(self, path: Path) -> int:  # noqa: ARG002
        return self.free


def open_run(
    folder: Path,
    objective: Groups,
    *,
    ranks: Coordinator | None = None,
    policy: Checkpoint | None = None,
    background: Executor | None = None,
    disk: Disk | None = None,
    uid: str = "uid-1",
    expected_bytes: int = 100,
    attempt: int = 0,
) -> RunCheckpoints:
    """Return the checkpoints of a start of a run, before it restores."""
    ranks = ranks or SingleRank()
    adapters = AdapterFacts(lora=None, beside="model", holds_weights=True)
    writer = RunWriter(Tensors(ranks.rank), objective, NoEvaluations(), adapters, is_first=ranks.rank == 0)
    writer.background = background or InlineExecutor()
    store = CheckpointStore(
        make_run_folder(folder, attempt, uid=uid),
        policy or Checkpoint(asynchronous=False),
        ranks,
        writer,
        disk or Disk(),
        background=InlineExecutor(),
    )
    board = HeartbeatBoard(folder.parent / f"board-{folder.name}-{attempt}-{ranks.rank}", 1)
    heartbeat = Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"})
    facts = StateFacts(derive_layout(Parallelism(), 1), "test", expected_bytes)
    return RunCheckpoints(store=store, writer=writer, state=facts, heartbeat=heartbeat)


def save_once(folder: Path, objective: Groups, **settings: Any) -> Path:
    """Save after step 3 of a new run; return the checkpoint."""
    run = open_run(folder, objective, **settings)
    assert run.restore() == 0
    run.save(3)
    return folder / "checkpoints/step-3.0.0"


def bits(arrays: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}


def test_arrays_come_back_to_the_bit_beside_what_is_json(tmp_path: Path) -> None:
    first = Groups({"cursor": "c", "unfinished": [[5, 0, 2]]}, GROUPS)
    checkpoint = save_once(tmp_path / "run", first)
    assert first.snapshots == 1
    assert (checkpoint / ARRAYS).is_file()
    resumed = Groups()
    assert open_run(tmp_path / "run", resumed, attempt=1).restore() == 3
    [state] = resumed.loaded
    assert state.entries == first.entries
    assert bits(state.arrays) == bits(GROUPS)


def test_an_objective_without_arrays_has_no_file_and_resumes_without(tmp_path: Path) -> None:
    checkpoint = save_once(tmp_path / "run", Groups({"cursor": "c"}))
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        *("complete.json", "manifest.json", "rank-0.distcp", "run-state.json")
    ]
    resumed = Groups()
    open_run(tmp_path / "run", resumed, attempt=1).restore()
    assert [(state.entries, state.arrays) for state in resumed.loaded] == [({"cursor": "c"}, {})]


def test_damaged_arrays_are_found_before_anything_is_resumed(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", Groups({"at": 3}, GROUPS))
    run.restore()
    run.save(3)
    run.writer.objective = Groups({"at": 4}, GROUPS)
    run.save(4)
    flip_bit(tmp_path / "run/checkpoints/step-4.0.0" / ARRAYS, at=-1)
    resumed = Groups()
    assert open_run(tmp_path / "run", resumed, attempt=1).restore() == 3
    assert [state.entries for state in resumed.loaded] == [{"at": 3}]


def test_a_save_takes_the_moment_and_training_does_not_wait_for_the_file(tmp_path: Path) -> None:
    gate, objective = threading.Event(), Groups({"at": 3}, GROUPS)
    with ThreadPoolExecutor(1) as background:
        background.submit(gate.wait, 60)
        policy = Checkpoint(asynchronous=True)
        run = open_run(tmp_path / "run", objective, background=background, policy=policy)
        run.restore()
        run.save(3)
        objective.entries, objective.arrays = {"at": 4}, {"group.number": np.array([9])}
        for _ in range(3):
            run.poll()
        checkpoint = tmp_path / "run/checkpoints/step-3.0.0"
        assert not (checkpoint / ARRAYS).exists()
        assert not (checkpoint / "complete.json").exists()
        gate.set()
        run.finish()
    assert (checkpoint / "complete.json").exists()
    resumed = Groups()
    open_run(tmp_path / "run", resumed, attempt=1).restore()
    assert resumed.loaded[0].entries == {"at": 3}
    assert bits(resumed.loaded[0].arrays) == bits(GROUPS)


class FullVolume(Executor):
    """Fails every write, as a full volume does."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ARG002
        future: Future[Any] = Future()
        future.set_exception(OSError(errno.ENOSPC, "No space left on device"))
        return future


def test_arrays_that_cannot_be_written_end_the_save_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"saving failed at .*No space left on device; the volume is full"):
        save_once(tmp_path / "run", Groups({}, GROUPS), background=FullVolume())
    assert not (tmp_path / "run/checkpoints/step-3.0.0/complete.json").exists()


@pytest.mark.parametrize(
    ("mode", "expected_steps", "loaded"),
    [
        pytest.param(ResumeMode.RUN, 3, [{"at": 3}], id="a run that continues another one"),
        pytest.param(ResumeMode.WEIGHTS, 0, [], id="a run that takes its weights"),
    ],
)
def test_another_job_takes_the_arrays_with_the_whole_run_only(
    tmp_path: Path, mode: ResumeMode, expected_steps: int, loaded: list[Mapping[str, Any]]
) -> None:
    save_once(tmp_path / "run", Groups({"at": 3}, GROUPS))
    objective = Groups()
    policy = Checkpoint(asynchronous=False, resume_from="run", resume=mode)
    other = open_run(tmp_path / "other", objective, policy=policy, uid="uid-2")
    assert other.restore() == expected_steps
    assert [state.entries for state in objective.loaded] == loaded
    assert [bits(state.arrays) for state in objective.loaded] == [bits(GROUPS) for _ in loaded]


def test_rank_0_alone_writes_and_reads_arrays(tmp_path: Path) -> None:
    everyones = [Groups({"at": rank}, GROUPS) for rank in range(2)]

    def save(ranks: Coordinator) -> None:
        run = open_run(tmp_path / "run", everyones[ranks.rank], ranks=ranks)
        run.restore()
        run.save(3)

    def resume(ranks: Coordinator) -> None:
        open_run(tmp_path / "run", everyones[ranks.rank], ranks=ranks, attempt=1).restore()

    assert ThreadCoordinators(2).run_on_ranks(save) == [None, None]
    assert [groups.snapshots for groups in everyones] == [1, 0]
    assert ThreadCoordinators(2).run_on_ranks(resume) == [None, None]
    assert [groups.loaded[0].entries for groups in everyones] == [{"at": 0}] * 2
    assert [[*groups.loaded[0].arrays] != [] for groups in everyones] == [True, False]


def test_a_state_that_rank_0_refuses_ends_every_rank(tmp_path: Path) -> None:
    save_once(tmp_path / "run", Groups({}, GROUPS))

    def resume(ranks: Coordinator) -> None:
        refusal = BadData("prompt 7 is unknown") if ranks.rank == 0 else None
        open_run(tmp_path / "run", Groups(refusal=refusal), ranks=ranks, attempt=1).restore()

    outcomes = ThreadCoordinators(2).run_on_ranks(resume)
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [
        (BadConfiguration, "rank 0: prompt 7 is unknown")
    ] * 2


def test_a_save_needs_room_for_its_own_arrays_and_not_for_those_of_the_last_one(tmp_path: Path) -> None:
    objective = Groups({}, {"routing.0": np.zeros((1000, 10, 10), np.uint8)})
    disk = SmallDisk(150_000)
    run = open_run(tmp_path / "run", objective, disk=disk, expected_bytes=20_000)
    run.restore()
    run.save(3)
    # As much as a state without arrays takes.
    disk.free = 20_000
    with pytest.raises(BadConfiguration, match="a checkpoint"):
        run.save(4)
    objective.arrays = {}
    run.save(5)
    assert run.store.last_step == 5


def calls_from_the_loop() -> list[str]:
    """Return the functions between the loop and the caller of this one, outermost first."""
    names = [frame.frame.f_code.co_qualname.rpartition("<locals>.")[2] for frame in reversed(inspect.stack()[2:])]
    return names[names.index("run_training_loop") :]


class WatchedDisk(Disk):
    """A volume that remembers how its first checkpoint got its marker."""

    calls: Sequence[str] = ()

    def rename(self, source: Path, target: Path) -> None:
        if target.name == "complete.json" and not self.calls:
            self.calls = calls_from_the_loop()
        super().rename(source, target)


class WatchedTensors(Tensors):
    """The state of a model that remembers how it was asked for its first file."""

    calls: Sequence[str] = ()

    def start_writing(self, folder: Path) -> PendingWrite:
        self.calls = self.calls or calls_from_the_loop()
        return super().start_writing(folder)


class IdleRun(Groups):
    """Engine, objective and stop of a run that learns nothing."""

    def begin_step(self, step: int) -> None: ...

    def updates(self, step: int, engine: TrainingEngine) -> Iterable[Sequence[MicroBatch]]:  # noqa: ARG002
        return [[]]

    def update(self, batches: Sequence[MicroBatch], loss: object) -> UpdateResult:  # noqa: ARG002
        return UpdateResult(0.0, 0.0, 0.0, 0, is_applied=True)

    def has_agreed(self) -> bool:
        return False


def test_a_save_takes_the_way_that_is_drawn(tmp_path: Path) -> None:
    drawn = re.findall(r"^ {4,}([\w.]+) {2,}[\w/]+\.py: ", checkpoints.__doc__ or "", re.MULTILINE)
    middle = drawn.index("RunCheckpoints.poll")
    begun, committed = drawn[:middle], [drawn[0], *drawn[middle:]]
    idle, disk, tensors = IdleRun(), WatchedDisk(), WatchedTensors()
    run = open_run(tmp_path / "run", idle, disk=disk, policy=Checkpoint(every_steps=1, asynchronous=True))
    run.writer.state = tensors
    run_training_loop(
        TrainingRun(engine=idle, objective=idle, checkpoints=run, stop=idle, total_steps=2, report=lambda *_: None)  # type: ignore[arg-type]  # the rest of an engine is never asked
    )
    # Behind the last of them the disk replaces a file.
    assert [*disk.calls] == [*committed, "replace_file", "publish_file"]
    assert len(committed) == 8
    assert [name for name in tensors.calls if name in begun] == begun
