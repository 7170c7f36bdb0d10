"""`moejob data`: starts the trainer's Python, which reads the data of a job as its run would."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moejob_api.contract.data_preview import DataPreview, PreviewLimits
from moejob_api.contract.pod_environment import spec_text
from moejob_api.documents import read_file
from moejob_api.models.sources import UnseenModel
from moejob_cli.inputs import job_model_shape
from moejob_cli.running.machine import installed_trainer


@dataclass(frozen=True, slots=True)
class PreviewFailure:
    """The exit code of the trainer's Python, and its error message."""

    exit_code: int
    message: str


def preview_file(
    file: str, extent: PreviewLimits, settings: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> DataPreview | PreviewFailure:
    """Return the data of the job in a file; CannotRun where there is no trainer to read it."""
    job = read_file(file, settings)
    python = installed_trainer(environ)
    # Standard error becomes the message of a failure: warnings of imports would stand in front of it.
    command = [str(python), "-W", "ignore", "-m", "moejob_trainer.data.preview"]
    command += ["--records", str(extent.records), "--examples", str(extent.examples)]
    shape = job_model_shape(job)
    if not isinstance(shape, UnseenModel):
        command += ["--vocabulary", str(shape.vocabulary)]
    process = subprocess.run(
        command, input=spec_text(job.spec), capture_output=True, text=True, check=False, env=dict(environ)
    )
    if process.returncode:
        return PreviewFailure(process.returncode, process.stderr.strip())
    return DataPreview.model_validate_json(process.stdout)
