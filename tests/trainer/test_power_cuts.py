"""Whole runs whose machine loses power at any moment: they go on by themselves and end with the same weights."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from block_images import FileSystem, Image, make_image
from moejob_trainer.checkpoints import find_latest_checkpoint
from moejob_trainer.checkpoints.names import MARKER
from trainer.runs import Runs, StartedRanks, await_result, read_steps

SECTIONS: dict[str, Any] = {
    "training": {"maxSteps": 6},
    "checkpoint": {"everySteps": 1, "keep": 2, "exportHuggingFace": True},
}
# A run of each takes ten seconds and more.
MOST_CUTS = 12
# What nothing trusts: locks and names, and what has no name yet.
UNTRUSTED = ("claims", "logs", ".building-", ".writing-", ".unfinished", ".replaced")
# A checkpoint makes the lines before it durable, and `_require_lines` reads them; until the first there may be none.
STEP_LOG = "steps.jsonl"


@dataclass
class Outage:
    """One run, and what losses of power at moments of it would have left."""

    image: Image
    run: StartedRanks
    folder: Path
    cuts: dict[str, Image] = field(default_factory=dict)

    def cut(self, name: str) -> None:
        """Take the state of this moment. The run stands still meanwhile and knows nothing of it."""
        self.run.signal(signal.SIGSTOP)
        try:
            self.cuts[name] = self.image.cut(self.folder / f"{name}.img")
        finally:
            self.run.signal(signal.SIGCONT)

    def forget_one(self, moments: random.Random) -> None:
        """Drop a state, each with the same probability."""
        self.cuts.pop(moments.choice([*self.cuts])).path.unlink()

    def cut_when(self, name: str, happens: Callable[[], object], random_seconds: float = 0.0) -> None:
        """Take the state a moment after something has happened."""
        await_result(lambda: happens() or not self.run.is_running(), name)
        time.sleep(random_seconds)
        self.cut(name)


@pytest.fixture
def mounts() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begun(folder: Path, kind: FileSystem, mounts: ExitStack) -> Outage:
    made = make_image(folder / "volume.img", kind)
    runs = Runs(mounts.enter_context(made.mount(folder / "volume")))
    mounts.callback(runs.close)
    return Outage(made, runs.start(**SECTIONS), folder)


@pytest.mark.slow
def test_a_run_that_loses_power_goes_on_by_itself_to_the_same_weights(tmp_path: Path, mounts: ExitStack) -> None:
    outage, moments = begun(tmp_path, FileSystem.EXT4, mounts), random.Random(42)
    place = outage.run.folder
    outage.cut_when("data prepared", lambda: [*place.glob("data/*/report.json")])
    outage.cut_when("a checkpoint", lambda: [*place.glob(f"checkpoints/*/{MARKER}")], moments.uniform(0, 0.3))
    outage.cut_when("exported", (place / "export").exists)
    assert not any(outage.run.await_exit_codes()), outage.run.read_log()
    outage.cut("ended")
    _all_go_on(outage, tmp_path)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("kind", FileSystem)
def test_a_run_that_loses_power_at_any_of_many_moments_goes_on_by_itself(
    tmp_path: Path, mounts: ExitStack, kind: FileSystem
) -> None:
    outage, moments = begun(tmp_path, kind, mounts), random.Random()
    for number in itertools.count():
        if not outage.run.is_running():
            break
        outage.cut(f"moment {number}")
        if len(outage.cuts) > MOST_CUTS:
            outage.forget_one(moments)
        time.sleep(moments.uniform(0.05, 0.6))
    assert not any(outage.run.await_exit_codes()), outage.run.read_log()
    outage.cut("ended")
    assert len(outage.cuts) > 5
    _all_go_on(outage, tmp_path)


def _all_go_on(outage: Outage, folder: Path) -> None:
    expected = _contents(outage.run.folder / "export")
    for number, (name, cut) in enumerate(outage.cuts.items()):
        with cut.mount(folder / f"cut-{number}") as volume:
            place = volume / "job"
            assert _empty_files(place) == [], name
            _require_lines(place)
            if (place / "export").exists() or name == "ended":
                assert _contents(place / "export") == expected, name
            runs = Runs(volume)
            try:
                runs.run_to_end(attempt=2, **SECTIONS)
            finally:
                runs.close()
            assert _contents(place / "export") == expected, name
            _require_loads(place / "export")
            assert [*place.glob("template/*")], name
            assert [step.step for step in read_steps(place)][-1] == SECTIONS["training"]["maxSteps"]
        cut.path.unlink()


def _contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _empty_files(run: Path) -> list[str]:
    """Files that a start would trust, and that lost their content."""
    incomplete = {path for path in run.glob("checkpoints/*") if not (path / MARKER).exists()}
    files = (path for path in run.rglob("*") if path.is_file() and incomplete.isdisjoint(path.parents))
    names = {path.relative_to(run).as_posix(): path.stat().st_size for path in files}
    untrusted = (*UNTRUSTED, STEP_LOG)
    return [name for name, size in names.items() if size == 0 and not any(part in name for part in untrusted)]


def _require_lines(run: Path) -> None:
    """Require the lines of all steps that the newest checkpoint stands for."""
    found = find_latest_checkpoint(run / "checkpoints").checkpoint
    if found is not None:
        # Behind them half a line may lie, or zeros.
        lines = (run / STEP_LOG).read_bytes().splitlines()[: found.folder.step]
        assert [json.loads(line)["step"] for line in lines] == [*range(1, found.folder.step + 1)]


def _require_loads(export: Path) -> None:
    assert AutoModelForCausalLM.from_pretrained(export).num_parameters() > 0
    assert len(AutoTokenizer.from_pretrained(export)) > 0
