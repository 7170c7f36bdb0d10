"""The model that a run starts from: a folder with config, tokenizer and weights, put on the volume once.

One rank downloads or writes it before the others look; afterwards every rank reads its own part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejob_api.job.model import Model
from moejob_api.models import catalog
from moejob_trainer.data import tiny
from moejob_trainer.data.hub import HubPins, download_model, require_own_code
from moejob_trainer.data.links import require_contained_links
from moejob_trainer.data.tokenizers import CLAIMS, locate_source
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.runtime.disk import Disk, explain_failure, keep_folder
from moejob_trainer.runtime.json_files import read_json

_CONFIG = "config.json"
_MODEL = "model"


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """A model as it lies on a disk of this machine."""

    folder: Path
    config: Mapping[str, Any]
    # spec.model as it lies here: the folder in place of a name on the hub, which may stand for other files by now.
    located: Model
    # False for the model that comes with moejob: it has no weights to start from.
    has_weights: bool


def fetch_model(model: Model, run_folder: Path, claims: Path = CLAIMS) -> Path:
    """Make sure that the model's files lie on a disk, and name their folder. One rank of the run calls this."""
    if model.source == tiny.TOKENIZER:
        return _write_tiny_model(run_folder / _MODEL)
    place = Path(locate_source(model.source, claims))
    if place.is_dir():
        return place
    if place.is_absolute() or model.source.startswith("."):
        raise BadConfiguration(f"there is no folder {place}, which spec.model.source names")
    fetched = download_model(model.source, model.revision, HubPins(run_folder))
    # Other jobs of the claim write to this cache as well.
    require_contained_links(fetched)
    return fetched


def read_pretrained(folder: Path, model: Model) -> PretrainedModel:
    """Read the folder that `fetch_model` named."""
    path = folder / _CONFIG
    try:
        # A volume that does not answer now may answer the next start.
        with explain_failure("reading the model's config", path):
            config = read_json(path) if path.exists() else None
    except ValueError as error:
        raise BadConfiguration(f"{path} cannot be read: {error}; spec.model.source needs it") from error
    if config is None:
        raise BadConfiguration(f"{path} cannot be read: it is not there; spec.model.source needs it")
    if model.trust_remote_code:
        require_own_code(folder)
    is_ours = model.source == tiny.TOKENIZER
    local_model = model if is_ours else model.model_copy(update={"source": str(folder), "revision": None})
    return PretrainedModel(folder, config, local_model, has_weights=not is_ours)


def _write_tiny_model(folder: Path) -> Path:
    def write(unfinished: Path) -> None:
        config = catalog.find_config(tiny.TOKENIZER)
        Disk().write(unfinished / _CONFIG, json.dumps(config, indent=2).encode() + b"\n")
        tiny.build_tokenizer().save_pretrained(unfinished)

    keep_folder(Disk(), folder, write)
    return folder
