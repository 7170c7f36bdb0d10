"""Decisions when to save, what to keep, and whether there is room."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_api.job.storage import Checkpoint
from moejob_api.quantities import GIB
from moejob_trainer.checkpoints.manifest import CheckpointFacts, EvaluationFacts
from moejob_trainer.checkpoints.names import StepFolder, parse_step_folder
from moejob_trainer.checkpoints.policy import (
    LastSave,
    best_folders,
    folders_to_delete,
    is_interval_over,
    room_complaint,
    start_complaint,
)
from moejob_trainer.checkpoints.verification import FolderState, ListedFolder
from moejob_trainer.runtime.fencing import FenceToken
from trainer.checkpoints.stand_ins import make_facts

MINUTE = 60.0
STEPS = Checkpoint(every_steps=50)
MINUTES = Checkpoint(every_minutes=10)


@pytest.mark.parametrize(
    ("policy", "step", "now", "last", "due"),
    [
        pytest.param(STEPS, 50, 0, LastSave(0, 0), True, id="every 50 steps: at 50"),
        pytest.param(STEPS, 49, 1e9, LastSave(0, 0), False, id="every 50 steps: not at 49, however late"),
        pytest.param(STEPS, 100, 0, LastSave(90, 0), True, id="every 50 steps: at 100 though resumed at 90"),
        pytest.param(STEPS, 140, 0, LastSave(90, 0), False, id="every 50 steps: not 50 after where it resumed"),
        pytest.param(STEPS, 100, 0, LastSave(100, 0), False, id="what is saved is not saved again"),
        pytest.param(MINUTES, 7, 10 * MINUTE, LastSave(0, 0), True, id="every 10 minutes: after 10"),
        pytest.param(MINUTES, 7, 10 * MINUTE - 1, LastSave(0, 0), False, id="every 10 minutes: not before"),
        pytest.param(
            MINUTES, 7, 15 * MINUTE, LastSave(3, 6 * MINUTE), False, id="every 10 minutes: since the last save"
        ),
        pytest.param(MINUTES, 3, 99 * MINUTE, LastSave(3, 0), False, id="nothing new, nothing to save"),
        pytest.param(Checkpoint(), 7, 30 * MINUTE, LastSave(0, 0), True, id="unsaid: after 30 minutes"),
        pytest.param(Checkpoint(), 7, 29 * MINUTE, LastSave(0, 0), False, id="unsaid: not after 29"),
    ],
)
def test_a_save_is_due(policy: Checkpoint, step: int, now: float, last: LastSave, due: bool) -> None:
    assert is_interval_over(step, now, policy, last) is due


OWN = FenceToken(2, 1)
SIGNS = {"": FolderState.COMPLETE, "?": FolderState.PARTIAL, "!": FolderState.REJECTED}


def folders(text: str) -> list[ListedFolder]:
    """Step folders as 10.0.0, those never completed with a ?, damaged ones with a !."""
    return [ListedFolder(_folder(word.rstrip("?!")), SIGNS[word[len(word.rstrip("?!")) :]]) for word in text.split()]


def _folder(numbers: str) -> StepFolder:
    folder = parse_step_folder(f"step-{numbers}")
    assert folder is not None
    return folder


@pytest.mark.parametrize(
    ("there", "keep", "deleted"),
    [
        pytest.param("", 2, "", id="nothing there"),
        pytest.param("10.0.0 20.0.0 30.2.1", 2, "10.0.0", id="the oldest of three"),
        pytest.param("10.0.0 20.0.0", 2, "", id="as many as are kept"),
        pytest.param("10.0.0 20.0.0 30.0.0", 1, "10.0.0 20.0.0", id="all but the newest"),
        pytest.param("10.0.0 20.0.0", 0, "10.0.0", id="never the newest, even when none is to be kept"),
        pytest.param("9.1.0 10.0.0 100.0.0", 2, "9.1.0", id="by number, not by text"),
        pytest.param("10.0.0 10.1.0 5.0.0", 1, "5.0.0 10.0.0", id="of one step the later start's stays"),
        pytest.param("10.0.0 20.1.0?", 2, "20.1.0", id="what an earlier attempt left unfinished"),
        pytest.param("10.0.0 20.2.0?", 2, "20.2.0", id="what an earlier restart left unfinished"),
        pytest.param("10.0.0 20.2.1?", 2, "", id="not what this start is writing"),
        pytest.param("10.0.0 20.2.2? 20.3.0?", 2, "", id="not what a later start is writing"),
        pytest.param("10.0.0 20.0.0? 30.0.0", 2, "20.0.0", id="unfinished ones do not count as kept"),
        pytest.param("10.3.0 20.3.0 30.3.0", 1, "", id="nothing of a later start"),
        pytest.param("10.0.0 20.3.0 30.3.0", 2, "10.0.0", id="our old ones, though a later start made the newer"),
        pytest.param("10.0.0 20.0.0!", 2, "", id="a damaged one stays until the run has come as far again"),
        pytest.param("10.0.0 20.0.0! 20.2.1", 2, "20.0.0", id="a damaged one goes when its step is saved again"),
        pytest.param("10.0.0 20.0.0! 30.2.1", 2, "20.0.0", id="a damaged one does not count as kept"),
        pytest.param("20.0.0! 30.0.0!", 1, "", id="damaged ones stay when there is nothing else"),
        pytest.param("20.3.0! 30.3.0", 1, "", id="not a damaged one of a later start"),
    ],
)
def test_what_is_deleted(there: str, keep: int, deleted: str) -> None:
    assert folders_to_delete(folders(there), keep, OWN) == [one.folder for one in folders(deleted)]


def test_what_resume_from_names_is_spared() -> None:
    assert folders_to_delete(folders("10.0.0 20.0.0 30.0.0"), 1, OWN, frozenset({_folder("10.0.0")})) == [
        _folder("20.0.0")
    ]


def judged(text: str) -> list[CheckpointFacts]:
    """Facts of step folders with the values of their evaluations: 10.0.0=2.5; one without a value has none."""
    made = []
    for name, _, value in (word.partition("=") for word in text.split()):
        folder = _folder(name)
        plain = make_facts(folder.step, folder.token.attempt, folder.token.restart)
        evaluation = EvaluationFacts(measure="evalLoss", value=float(value)) if value else None
        made.append(plain.model_copy(update={"evaluation": evaluation}))
    return made


@pytest.mark.parametrize(
    ("there", "count", "expected"),
    [
        pytest.param("10.0.0=2 20.0.0=1 30.0.0=3", 1, "20.0.0", id="the lowest loss"),
        pytest.param("10.0.0=2 20.0.0=1 30.0.0=3", 2, "20.0.0 10.0.0", id="the best first"),
        pytest.param("10.0.0=2 20.0.0=1 30.0.0=1", 1, "20.0.0", id="of two alike the earlier"),
        pytest.param("10.0.0=2 10.1.0=2 20.0.0=3", 2, "10.1.0 20.0.0", id="of one step the later start's"),
        pytest.param("10.0.0 20.0.0=2", 2, "20.0.0", id="only what was evaluated"),
        pytest.param("10.0.0=1", 0, "", id="none when none is to be kept"),
    ],
)
def test_the_best_checkpoints(there: str, count: int, expected: str) -> None:
    assert best_folders(judged(there), "evalLoss", count) == [_folder(name) for name in expected.split()]


def test_a_reward_is_better_when_it_is_higher_and_other_measures_do_not_count() -> None:
    rewards = [
        one.model_copy(update={"evaluation": EvaluationFacts(measure="evalMean@4", value=value)})
        for one, value in zip(judged("10.0.0 20.0.0"), (0.25, 0.5), strict=True)
    ]
    found = best_folders([*rewards, *judged("30.0.0=9")], "evalMean@4", 2)
    assert found == [_folder("20.0.0"), _folder("10.0.0")]


CLAIMS = st.builds(FenceToken, st.integers(0, 3), st.integers(0, 2))
SEEN = st.lists(
    st.builds(ListedFolder, st.builds(StepFolder, st.integers(0, 9), CLAIMS), st.sampled_from(FolderState)),
    unique_by=lambda one: one.folder,
)


@given(SEEN, st.integers(1, 4), CLAIMS)
def test_the_newest_stay_and_nothing_newer_than_ourselves_goes(
    there: list[ListedFolder], keep: int, own: FenceToken
) -> None:
    gone = set(folders_to_delete(there, keep, own))
    complete = sorted((one.folder for one in there if one.state is FolderState.COMPLETE), reverse=True)
    assert gone.isdisjoint(complete[:keep])
    assert all(folder.token <= own for folder in gone)
    assert gone.isdisjoint(one.folder for one in there if one.state is FolderState.PARTIAL and one.folder.token == own)
    left = [one for one in there if one.folder not in gone]
    assert folders_to_delete(left, keep, own) == []


def test_a_checkpoint_that_fits_is_not_complained_about() -> None:
    assert room_complaint(free_bytes=5 * GIB, needed_bytes=5 * GIB, keep=2, path=Path("/moejob/sft")) is None


def test_a_full_volume_is_named_with_numbers_and_the_fix() -> None:
    said = room_complaint(free_bytes=2 * GIB, needed_bytes=5 * GIB, keep=2, path=Path("/moejob/sft"))
    assert said == (
        "a checkpoint takes 5.0 GiB and /moejob/sft has 2.0 GiB left; free 3.0 GiB on the volume, "
        "or make it so much larger; a lower checkpoint.keep (now 2) leaves more"
    )


def test_one_that_keeps_a_single_checkpoint_is_not_told_to_keep_fewer() -> None:
    assert "keep" not in str(room_complaint(free_bytes=0, needed_bytes=GIB, keep=1, path=Path("/moejob/sft")))


def test_a_run_that_could_not_save_once_is_named_with_numbers_and_the_fix() -> None:
    path = Path("/moejob/sft")
    assert start_complaint(5 * GIB, checkpoint_bytes=4 * GIB, export_bytes=GIB, path=path) is None
    assert start_complaint(3 * GIB, checkpoint_bytes=4 * GIB, export_bytes=GIB, path=path) == (
        "a checkpoint takes 4.0 GiB and the export 1.0 GiB, and /moejob/sft has 3.0 GiB left; free 2.0 GiB on the "
        "volume, or make it so much larger"
    )
    assert "export" not in str(start_complaint(3 * GIB, checkpoint_bytes=4 * GIB, export_bytes=0, path=path))
