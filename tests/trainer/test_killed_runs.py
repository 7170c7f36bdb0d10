"""Runs that are killed, frozen or find their checkpoints damaged go on as if nothing had happened, loss for loss."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moejob_trainer.checkpoints import VerificationDepth, find_latest_checkpoint
from moejob_trainer.checkpoints.names import MARKER, parse_step_folder
from trainer import random_model
from trainer.runs import Runs, StartedRanks, Step, await_result, read_steps

KILLS = 12
# Two ranks that share the experts, as in examples/tiny-sft.yaml.
TWO_RANKS: dict[str, Any] = {"parallelism": {"expert": 2}, "resources": {"gpusPerNode": 2}}
ENDLESS: dict[str, Any] = TWO_RANKS | {"training": {"maxSteps": 10_000}}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    volume = tmp_path / "volume"
    volume.mkdir()
    made = Runs(volume)
    yield made
    made.close()


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_goes_on_from_a_complete_checkpoint(runs: Runs) -> None:
    moments, newest, unfinished = random.Random(20), 0, 0
    for attempt in range(1, KILLS + 1):
        is_async = attempt % 2 == 0
        run = runs.start(attempt=attempt, **ENDLESS, checkpoint={"async": is_async})
        _has_saved(run, newest + 1)
        saved_at = time.monotonic()
        _has_saved(run, newest + 2)
        # Within the next step and its save, however long they take on this machine.
        time.sleep(moments.uniform(0.0, time.monotonic() - saved_at))
        assert run.is_running(), run.read_log()
        run.kill()
        assert _of_attempt(run, attempt)[0].step == newest + 1
        # What is on the disk is looked at with other eyes than those of the next attempt.
        found = find_latest_checkpoint(run.folder / "checkpoints", VerificationDepth.HASHES).checkpoint
        assert found is not None
        assert found.folder.step >= newest + 2
        newest = found.folder.step
        unfinished += any(not (path / MARKER).exists() for path in (run.folder / "checkpoints").iterdir())
    # Else the moments were not those of saving.
    assert unfinished >= KILLS // 4
    _is_undisturbed(runs, runs.volume / "job", **TWO_RANKS)


@pytest.mark.slow
def test_a_flipped_byte_in_any_file_is_found_and_the_older_checkpoint_taken(runs: Runs) -> None:
    run = runs.run_to_end(**TWO_RANKS)
    checkpoints = run.folder / "checkpoints"
    search = find_latest_checkpoint(checkpoints)
    assert search.checkpoint is not None
    assert search.checkpoint.folder.step == 3
    files = [path for path in sorted(search.checkpoint.path.iterdir()) if path.name != MARKER]
    assert len(files) == 4
    for path in files:
        with _one_byte_flipped(path):
            damaged = find_latest_checkpoint(checkpoints)
        assert damaged.checkpoint is not None, path.name
        assert damaged.checkpoint.folder.step == 2, path.name
        assert [refusal.folder.step for refusal in damaged.refusals] == [3]
    _flip(files[-1])
    runs.run_to_end(attempt=2, **TWO_RANKS, training={"maxSteps": 5})
    assert [step.step for step in _of_attempt(run, 2)] == [3, 4, 5]
    _is_undisturbed(runs, run.folder, **TWO_RANKS)


@pytest.fixture
def model_in_file(tmp_path: Path) -> dict[str, Any]:
    """A model whose weights lie in a file."""
    random_model.write(tmp_path / "model")
    return TWO_RANKS | {"model": {"source": str(tmp_path / "model")}}


@pytest.mark.slow
def test_a_run_that_resumes_reads_its_checkpoint_and_not_the_published_weights_again(
    runs: Runs, model_in_file: dict[str, Any]
) -> None:
    run = runs.run_to_end(**model_in_file)
    expected = [
        step.loss for step in read_steps(runs.run_to_end("calm", **model_in_file, training={"maxSteps": 5}).folder)
    ]
    (weights,) = Path(model_in_file["model"]["source"]).glob("*.safetensors")
    held = weights.read_bytes()
    # The names and shapes stay; no number does.
    begin = 8 + int.from_bytes(held[:8], "little")
    weights.write_bytes(held[:begin] + b"\xff" * (len(held) - begin))
    runs.run_to_end(attempt=2, **model_in_file, training={"maxSteps": 5})
    assert [step.loss for step in read_steps(run.folder)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_ranks_of_an_older_attempt_that_wake_up_commit_nothing(runs: Runs) -> None:
    old = runs.start(attempt=1, **ENDLESS)
    _has_saved(old, 2)
    old.signal(signal.SIGSTOP)
    asleep_at = read_steps(old.folder)[-1].step
    new = runs.run_to_end(attempt=2, **TWO_RANKS, training={"maxSteps": asleep_at + 3})
    kept = _contents(new.folder / "checkpoints")
    old.signal(signal.SIGCONT)
    codes = old.await_exit_codes()
    assert 1 in codes
    assert "Superseded: " in old.read_log()
    assert _contents(new.folder / "checkpoints") == kept
    runs.run_to_end(attempt=3, **TWO_RANKS, training={"maxSteps": asleep_at + 4})
    _is_undisturbed(runs, new.folder, **TWO_RANKS)


@pytest.mark.slow
def test_a_run_goes_on_with_the_next_documents_on_another_number_of_data_ranks(runs: Runs) -> None:
    runs.run_to_end(training={"maxSteps": 3})
    runs.run_to_end(attempt=2, parallelism={"data": 2}, training={"maxSteps": 6})
    run = runs.run_to_end(attempt=3, training={"maxSteps": 8})
    alone = runs.run_to_end("alone", training={"maxSteps": 8})
    found = [(step.step, step.attempt) for step in read_steps(run.folder)]
    assert found == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 3), (8, 3)]
    # Other sums, rounded otherwise; another document would show in the second digit.
    assert [step.loss for step in read_steps(run.folder)] == pytest.approx(
        [step.loss for step in read_steps(alone.folder)], rel=1e-5
    )


@pytest.mark.slow
def test_a_run_ends_with_the_word_that_its_last_step_is_saved(runs: Runs) -> None:
    # Nothing is saved before the end, and that in the background.
    run = runs.run_to_end(**TWO_RANKS, checkpoint={"everySteps": 1000, "async": True})
    again = runs.run_to_end(attempt=2, **TWO_RANKS)
    for told in (run.board.read_run(), again.board.read_run()):
        assert told is not None
        assert (told.step, told.total_steps, told.last_checkpoint_step) == (3, 3, 3)
    assert len(read_steps(run.folder)) == 3


# --- what is looked at ----------------------------------------------------------------------------------------------


def _has_saved(run: StartedRanks, step: int) -> None:
    def look() -> bool:
        assert run.is_running(), run.read_log()
        complete = (parse_step_folder(path.parent.name) for path in run.folder.glob(f"checkpoints/*/{MARKER}"))
        return any(folder is not None and folder.step >= step for folder in complete)

    await_result(look, f"the checkpoint of step {step}")


def _of_attempt(run: StartedRanks, attempt: int) -> list[Step]:
    return [step for step in read_steps(run.folder) if step.attempt == attempt]


def _is_undisturbed(runs: Runs, folder: Path, **sections: Any) -> None:
    """Every loss that the run reports is the one of an undisturbed run, to the last bit."""
    told = read_steps(folder)
    last = max(step.step for step in told)
    alone = runs.run_to_end("undisturbed", **sections, training={"maxSteps": last}, checkpoint={"everySteps": 1000})
    expected = {step.step: step.loss for step in read_steps(alone.folder)}
    assert len(expected) == last
    assert {*expected.values()} != {next(iter(expected.values()))}
    assert [(step.step, step.loss) for step in told] == [(step.step, expected[step.step]) for step in told]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class _one_byte_flipped:  # noqa: N801 used as a phrase
    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        _flip(self._path)

    def __exit__(self, *_: object) -> None:
        _flip(self._path)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (path.parent / MARKER).exists()
    }
