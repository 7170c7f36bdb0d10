"""A deterministic job computes the same bits again, though it is stopped in between, and though steps are traced."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.runs import Runs, StartedRanks, read_steps

TRAINING: dict[str, Any] = {"maxSteps": 3, "deterministic": True, "profile": {"ranks": [1], "memory": True}}


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, StartedRanks]]:
    """The run folders of two runs of one job, and how the first went: the second is stopped after two steps."""
    runs = Runs(tmp_path_factory.mktemp("deterministic") / "volume")
    layout: dict[str, Any] = {"parallelism": {"expert": 2}, "checkpoint": {"async": False}}
    once = runs.run_to_end("once", training=TRAINING, before="reported algorithms", **layout)
    for attempt, done in ((1, 2), (2, 3)):
        untraced = TRAINING | {"profile": None, "maxSteps": done}
        runs.run_to_end("again", attempt=attempt, training=untraced, **layout)
    yield runs.volume, once
    runs.close()


def read_newest_state(run: Path) -> dict[str, Tensor]:
    """Weights, moments and counters of the newest checkpoint, by file and name."""
    newest = max((run / "checkpoints").iterdir())
    files = sorted(newest.glob("state-*.safetensors"))
    return {f"{file.name}: {name}": tensor for file in files for name, tensor in load_file(file).items()}


def test_losses_weights_and_moments_are_the_same_to_the_bit(volume: tuple[Path, StartedRanks]) -> None:
    folder, _ = volume
    once, again = folder / "once", folder / "again"
    assert [step.loss for step in read_steps(once)] == [step.loss for step in read_steps(again)]
    expected, found = read_newest_state(once), read_newest_state(again)
    assert expected.keys() == found.keys()
    assert expected
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_every_rank_leaves_out_algorithms_that_are_not_deterministic(volume: tuple[Path, StartedRanks]) -> None:
    assert volume[1].read_log().count("deterministic algorithms: True") == 2


def test_the_named_steps_of_the_named_ranks_are_traced(volume: tuple[Path, StartedRanks]) -> None:
    folder, once = volume
    (trace,) = (folder / "once" / "profile").iterdir()
    assert trace.name == "step-2-rank-1.json.gz"
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"step 2", "forward and backward", "gradients", "optimizer", "[memory]"} <= names
    assert not {"step 1", "step 3"} & names
    assert "longest operators of rank 1" in once.read_log()
    assert "aten::mm" in once.read_log()
