"""`moejob data`: starts the trainer's Python, which reads the data of a job as its run would."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from moejob_api.contract.data_preview import DataPreview, PreviewLimits
from moejob_api.contract.pod_environment import spec_text
from moejob_api.documents import read_file
from moejob_api.job import Spec
from moejob_api.models.sources import UnseenModel
from moejob_cli.inputs import job_model_shape
from moejob_cli.running.machine import installed_trainer

_HUB = "https://huggingface.co"
_ANSWER_SECONDS = 5.0
# What stands in front of sources that are not on the hub.
_ELSEWHERE = ("/", "./", "../", "pvc://", "moejob/")


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
    # The hub's library tries each of its requests for half a minute before it takes what is in its cache.
    is_hub_away = _needs_hub(job.spec) and not can_reach_hub(environ)
    variables = {**environ, **({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if is_hub_away else {})}
    process = subprocess.run(
        command, input=spec_text(job.spec), capture_output=True, text=True, check=False, env=variables
    )
    if process.returncode:
        away = f"\nthe hub at {_hub_address(environ)} does not answer from this machine" if is_hub_away else ""
        return PreviewFailure(process.returncode, process.stderr.strip() + away)
    return DataPreview.model_validate_json(process.stdout)


def can_reach_hub(environ: Mapping[str, str]) -> bool:
    """Return whether a connection to the hub can be made; True behind a proxy, which alone knows."""
    if any(environ.get(name) or environ.get(name.lower()) for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")):
        return True
    address = urlsplit(_hub_address(environ))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), _ANSWER_SECONDS).close()
    # UnicodeError: of a host that is no name.
    except (OSError, UnicodeError):
        return False
    return True


def _hub_address(environ: Mapping[str, str]) -> str:
    return environ.get("HF_ENDPOINT") or _HUB


def _needs_hub(spec: Spec) -> bool:
    """Return whether the model's tokenizer or a data set is named as on the hub."""
    sources = [spec.model.config_source, *(dataset.source for dataset in (*spec.data.train, *spec.data.eval))]
    return any(not source.startswith(_ELSEWHERE) and not Path(source).exists() for source in sources)
