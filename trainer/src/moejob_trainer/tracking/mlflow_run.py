"""A run on an MLflow server, by the client of moejob-trainer[tracking]; credentials come from the environment."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from moejob_api.job.lifecycle import MLflow
from moejob_trainer.tracking.backends import StepNumbers, TrackedRun

_UID = "moejob.uid"
# The server's limits: parameters of one request, and characters of one value.
_MOST_PARAMETERS, _MOST_CHARACTERS = 100, 500


class MLflowRun:
    """One MLflow run for one job, found again by the job's uid."""

    def __init__(self, run: TrackedRun, mlflow: MLflow) -> None:
        # The client would print a link at the end, and the last line of rank 0 is quoted when a run fails.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        # The client has no state that other code in the process would share.
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=mlflow.tracking_uri)
        self._entities = importlib.import_module("mlflow.entities")
        experiment = self._experiment_id(mlflow.experiment)
        self._run_id = self._resume_run(experiment, run.uid) or self._create_run(experiment, run)

    def write(self, numbers: StepNumbers) -> None:
        """Send all numbers of a step in one request."""
        milliseconds = int(numbers.time * 1000)
        self._client.log_batch(
            self._run_id,
            metrics=[
                self._entities.Metric(metric_name(name), value, milliseconds, numbers.step)
                for name, value in numbers.values.items()
            ],
        )

    def close(self, *, has_failed: bool) -> None:
        """Report the end of the run."""
        self._client.set_terminated(self._run_id, "FAILED" if has_failed else "FINISHED")

    def _experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        identity: str = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        return identity

    def _resume_run(self, experiment: str, uid: str) -> str | None:
        runs = self._client.search_runs([experiment], f"tags.`{_UID}` = '{uid}'", max_results=1)
        if not runs:
            return None
        identity: str = runs[0].info.run_id
        self._client.update_run(identity, status="RUNNING")
        return identity

    def _create_run(self, experiment: str, run: TrackedRun) -> str:
        identity: str = self._client.create_run(experiment, run_name=run.job, tags={_UID: run.uid}).info.run_id
        fields = _flatten_fields(run.describe_spec())
        parameters = [self._entities.Param(name, str(value)[:_MOST_CHARACTERS]) for name, value in fields]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(identity, params=parameters[start : start + _MOST_PARAMETERS])
        return identity


def metric_name(name: str) -> str:
    """Return a name that servers take: they refuse a whole step for an `@` or an empty part between slashes."""
    return re.sub(r"/{2,}|[^\w\-. :/]", "-", name)


def _flatten_fields(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flatten_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
