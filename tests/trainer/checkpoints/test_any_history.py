"""Whatever happens to a run, in any order: its newest complete checkpoint is found, and none that counts is lost."""

from __future__ import annotations

import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moejob_trainer.checkpoints import CheckpointStore, FenceToken, StepFolder, find_latest_checkpoint
from moejob_trainer.checkpoints.names import parse_step_folder
from moejob_trainer.errors import BadConfiguration, Superseded
from trainer.checkpoints.stand_ins import (
    FragileDisk,
    ProcessCrash,
    StateWriter,
    files_below,
    flip_bit,
    make_policy,
    make_run_folder,
    make_save_request,
    make_state_files,
    open_store,
)

KEEP = 2
# A save takes about 40 operations on the volume, a start about 15.
OPERATION = st.integers(1, 45)
# Without a seed only the process dies; with one, power goes and takes what was not synced.
POWER = st.none() | st.integers(0, 10**6)


class History(RuleBasedStateMachine):
    """A run folder, the process that owns it, and those that do not know yet that they no longer do."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="moejob-history-"))
        self.checkpoints = self.folder / "checkpoints"
        self.owner = FenceToken(0, 0)
        self.step = 0
        self.living: CheckpointStore | None = None
        self.disk = FragileDisk()
        self.sleeping: list[CheckpointStore] = []
        self.promised: set[StepFolder] = set()
        self.committed: set[StepFolder] = set()
        self.damaged: set[StepFolder] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    # --- what can be seen without the code under test ---

    def marked(self, name: str = "complete.json") -> set[StepFolder]:
        found = {parse_step_folder(path.parent.name) for path in self.checkpoints.glob(f"step-*/{name}")}
        return {folder for folder in found if folder is not None}

    def good(self) -> set[StepFolder]:
        return {folder for folder in self.marked() - self.damaged if self.is_whole(folder)}

    def is_whole(self, folder: StepFolder) -> bool:
        lies = files_below(self.checkpoints / folder.name)
        return all(lies.get(name) == content for name, content in make_state_files(folder).items())

    # --- what happens ---

    @rule(attempt=st.booleans(), crash_at=st.none() | OPERATION, power=POWER)
    def another_start(self, attempt: bool, crash_at: int | None, power: int | None) -> None:
        if self.living is not None:
            self.sleeping.append(self.living)
        token = (
            FenceToken(self.owner.attempt + 1, 0) if attempt else FenceToken(self.owner.attempt, self.owner.restart + 1)
        )
        self.owner, self.disk = token, FragileDisk(crash_at, None if power is None else random.Random(power))
        where = make_run_folder(self.folder, token.attempt, token.restart, is_ours=lambda: self.owner == token)
        writer = StateWriter(self.disk, questions=1)
        self.living = open_store(where, make_policy(KEEP, asynchronous=True), self.disk, writer)
        try:
            self.begin(self.living)
        except ProcessCrash:
            self.living = None
        self.disk.crash_at = None

    def begin(self, run: CheckpointStore) -> None:
        good, once = self.good(), self.marked() | self.marked("rejected.json")
        # Damage that is newer than the newest good one is found at the start, and no longer counts.
        counting = sorted((one for one in self.marked() if one <= max(good, default=one)), reverse=True)[:KEEP]
        if once and not good:
            with pytest.raises(BadConfiguration, match="none is good"):
                run.start()
            self.move_away()
        found = run.start()
        assert (None if found is None else found.folder) == max(self.good(), default=None)
        assert self.good() >= good.intersection(counting)
        self.step = 0 if found is None else found.folder.step

    def move_away(self) -> None:
        shutil.rmtree(self.checkpoints)
        self.promised, self.committed, self.damaged = set(), set(), set()

    @precondition(lambda self: self.living is not None)
    @rule(steps=st.integers(1, 3), to_the_end=st.booleans(), crash_at=st.none() | OPERATION, power=POWER)
    def save(self, steps: int, to_the_end: bool, crash_at: int | None, power: int | None) -> None:
        run = self.living
        assert run is not None
        self.step += steps
        self.disk.crash_at = None if crash_at is None else self.disk.operations + crash_at
        self.disk.power = None if power is None else random.Random(power)
        try:
            run.save(make_save_request(self.step))
            self.note(run)
            if to_the_end:
                assert run.wait() is not None
                assert run.last_step == self.step
        except ProcessCrash:
            self.living = None
        self.disk.crash_at = None
        self.note(run)

    @precondition(lambda self: self.living is not None)
    @rule()
    def train(self) -> None:
        assert self.living is not None
        self.living.poll()
        self.note(self.living)

    def note(self, run: CheckpointStore) -> None:
        if run.last_saved is not None and run is self.living:
            self.promised.add(run.last_saved.folder)
        # After a crash a marker may have got its name though no rank knows.
        self.committed |= self.marked() | self.promised

    @precondition(lambda self: self.good())
    @rule(data=st.data())
    def a_bit_flips(self, data: st.DataObject) -> None:
        folder = data.draw(st.sampled_from(sorted(self.good())))
        path = self.checkpoints / folder.name
        name = data.draw(st.sampled_from(sorted(files_below(path))))
        flip_bit(path / name, data.draw(st.integers(0, (path / name).stat().st_size - 1)))
        self.damaged.add(folder)

    @precondition(lambda self: self.sleeping)
    @rule(data=st.data())
    def an_older_process_wakes_up(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.sleeping))
        marked, lies = self.marked(), self.newer_files(run.run_folder.token)
        # It may have nothing to finish; it never gets as far as to begin.
        with suppress(Superseded):
            assert run.wait() is None
        with pytest.raises(Superseded):
            run.save(make_save_request(self.step + 100))
        assert self.marked() == marked
        assert self.newer_files(run.run_folder.token) == lies

    def newer_files(self, token: FenceToken) -> dict[str, bytes]:
        folders = [(parse_step_folder(path.name), path) for path in self.checkpoints.glob("step-*")]
        newer = [path for folder, path in folders if folder is not None and folder.token > token]
        return {f"{path.name}/{name}": content for path in newer for name, content in files_below(path).items()}

    # --- what holds all the time ---

    @invariant()
    def the_newest_complete_checkpoint_is_found(self) -> None:
        found = find_latest_checkpoint(self.checkpoints).checkpoint
        assert (None if found is None else found.folder) == max(self.good(), default=None)

    @invariant()
    def none_that_counts_is_lost(self) -> None:
        for folder in self.promised - self.damaged:
            if sum(other > folder for other in self.committed) < KEEP:
                assert folder in self.good()


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=60, stateful_step_count=30)
