"""A run resumes under another job, in another layout, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moejob_trainer.checkpoints.adapter_compatibility import refuse_other_adapters
from moejob_trainer.errors import BadConfiguration
from trainer.runs import Runs, read_steps
from trainer.test_inherited_adapters import LORA, RATE, of

DONE, ALL = 2, 5
RUN: dict[str, Any] = {"resumeFrom": "first", "resume": "Run", "async": False}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path / "volume")
    yield started
    started.close()


def read_losses(runs: Runs, job: str) -> dict[int, float]:
    return {step.step: step.loss for step in read_steps(runs.volume / job)}


@pytest.mark.parametrize("lora", [pytest.param(None, id="all weights"), pytest.param(LORA, id="adapters")])
def test_another_job_goes_on_in_another_layout_with_the_losses_of_one_run(
    runs: Runs, lora: dict[str, Any] | None
) -> None:
    training = {"optimizer": RATE} | ({} if lora is None else {"lora": lora})
    runs.run_to_end("whole", training=training | {"maxSteps": ALL})
    runs.run_to_end("first", training=training | {"maxSteps": DONE}, parallelism={"data": 2})
    other: dict[str, Any] = {"parallelism": {"pipeline": 2}, "checkpoint": RUN}
    runs.run_to_end("second", training=training | {"maxSteps": ALL - 1}, **other)
    # Its own checkpoints count from the first one on, which would have been the other's.
    runs.run_to_end("second", attempt=2, training=training | {"maxSteps": ALL}, **other)
    whole, second = read_losses(runs, "whole"), read_losses(runs, "second")
    assert list(second) == list(range(DONE + 1, ALL + 1))
    assert second == pytest.approx({step: whole[step] for step in second}, rel=1e-6)


def test_a_run_with_new_adapters_does_not_go_on_with_one_that_had_none() -> None:
    theirs, ours = of(), of(LORA, checkpoint={"resumeFrom": "first", "resume": "Run"})
    with pytest.raises(BadConfiguration, match=r"leave out checkpoint\.resume to begin with new adapters"):
        refuse_other_adapters(theirs, ours, Path("/runs/first/checkpoints/step-2"), continues_run=True)
