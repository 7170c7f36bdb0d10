"""A run of Weights & Biases, by the package of moejob-trainer[tracking]; the API key comes from the environment."""

from __future__ import annotations

import importlib

from moejob_api.job.lifecycle import Wandb
from moejob_trainer.tracking.backends import StepNumbers, TrackedRun


class WandbRun:
    """One W&B run for one job, which all attempts resume."""

    def __init__(self, run: TrackedRun, wandb: Wandb) -> None:
        package = importlib.import_module("wandb")
        self._run = package.init(
            id=run.uid,
            resume="allow",
            name=run.job,
            project=wandb.project,
            entity=wandb.entity,
            group=wandb.group,
            config=run.describe_spec(),
            dir=str(run.folder),
            # The launcher has the output of ranks, and quotes its last line when a rank fails.
            settings=package.Settings(console="off", silent=True),
        )
        # Its own step counter never decreases; ours does, after a restart from a checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, numbers: StepNumbers) -> None:
        """Log one row."""
        self._run.log({"step": numbers.step, **numbers.values})

    def close(self, *, has_failed: bool) -> None:
        """Wait until all rows are sent."""
        self._run.finish(exit_code=int(has_failed))
