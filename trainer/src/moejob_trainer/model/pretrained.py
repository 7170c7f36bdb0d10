"""The model that a run starts from: a folder with config, tokenizer and weights, put on the volume once.

One rank downloads or writes it before the others look; afterwards every rank reads its own part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejob_api.contract.pods import RunFile
from moejob_api.job.model import Model
from moejob_api.models import catalog
from moejob_trainer.data import tiny
from moejob_trainer.data.hub import WEIGHT_FILES, HubPins, download_model, require_own_code
from moejob_trainer.data.links import require_contained_links
from moejob_trainer.data.tokenizers import CLAIMS, locate_source
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.runtime.disk import Disk, explain_failure, keep_folder, remove_tree, replace_file
from moejob_trainer.runtime.heartbeats import ShareReport, ignore_share
from moejob_trainer.runtime.json_files import read_json
from moejob_trainer.runtime.megatron_process import convert_from_megatron, is_megatron_checkpoint

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """A model as it lies on a disk of this machine."""

    folder: Path
    config: Mapping[str, Any]
    # spec.model as it lies here: the folder in place of a name on the hub, which may stand for other files by now.
    located: Model
    # False for the model that comes with moejob: it has no weights to start from.
    has_weights: bool


def fetch_model(
    model: Model, run_folder: Path, claims: Path = CLAIMS, report_share: ShareReport = ignore_share
) -> Path:
    """Make sure that the model's files lie on a disk, and name their folder. One rank of the run calls this."""
    if model.source == tiny.TOKENIZER:
        return _write_tiny_model(run_folder / RunFile.MODEL)
    if (converted := _find_converted(model, run_folder)) is not None:
        return converted
    place = _find_folder(model.source, "source", claims)
    if place is None:
        return _download_model(model.source, model.revision, run_folder, report_share=report_share)
    if is_megatron_checkpoint(place):
        return _convert_checkpoint(place, model, run_folder, claims)
    if model.config is not None:
        raise BadConfiguration(
            f"spec.model.config describes a checkpoint of Megatron, and {place} is none: it has no "
            "latest_checkpointed_iteration.txt; remove config, or correct spec.model.source"
        )
    return place


def name_for_others(model: Model, run_folder: Path) -> str:
    """Return the name under which others find a run's model: they cannot read a checkpoint of Megatron."""
    converted = _find_converted(model, run_folder)
    return model.source if converted is None else str(converted)


def _find_folder(source: str, field: str, claims: Path) -> Path | None:
    """Return the folder that a field of spec.model names; None for a name on the hub."""
    place = Path(locate_source(source, claims))
    if place.is_dir():
        return place
    if place.is_absolute() or source.startswith("."):
        raise BadConfiguration(f"there is no folder {place}, which spec.model.{field} names")
    return None


def _download_model(
    name: str,
    revision: str | None,
    run_folder: Path,
    left_out: Sequence[str] = (),
    report_share: ShareReport = ignore_share,
) -> Path:
    fetched = download_model(name, revision, HubPins(run_folder), left_out, report_share)
    # Other jobs of the claim write to this cache as well.
    require_contained_links(fetched)
    return fetched


def _find_converted(model: Model, run_folder: Path) -> Path | None:
    """Return the folder of an earlier start, which the run keeps even if the checkpoint is newer by now."""
    origin, folder = run_folder / RunFile.MODEL_ORIGIN, run_folder / RunFile.MODEL
    return folder if origin.is_file() and origin.read_bytes() == _origin_text(model) and folder.is_dir() else None


def _convert_checkpoint(checkpoint: Path, model: Model, run_folder: Path, claims: Path) -> Path:
    template, folder = _fetch_template(checkpoint, model, run_folder, claims), run_folder / RunFile.MODEL
    remove_tree(Disk(), folder)
    convert_from_megatron(checkpoint, template, folder)
    replace_file(Disk(), run_folder / RunFile.MODEL_ORIGIN, _origin_text(model))
    return folder


def _fetch_template(checkpoint: Path, model: Model, run_folder: Path, claims: Path) -> Path:
    """Return the folder of config.json and tokenizer that belong to a checkpoint of Megatron."""
    if model.config is None:
        if not (checkpoint / _CONFIG).is_file():
            raise BadConfiguration(
                f"{checkpoint} is a checkpoint of Megatron, which says neither architecture nor tokenizer; name the "
                f"Hugging Face model that it was made of in spec.model.config, or put its {_CONFIG} and tokenizer there"
            )
        return checkpoint
    if model.config == tiny.TOKENIZER:
        return _write_tiny_model(run_folder / RunFile.TEMPLATE)
    place = _find_folder(model.config, "config", claims)
    return place or _download_model(model.config, model.revision, run_folder, WEIGHT_FILES)


def _origin_text(model: Model) -> bytes:
    return model.model_dump_json(by_alias=True, include={"source", "config", "revision"}).encode() + b"\n"


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
    local_model = (
        model if is_ours else model.model_copy(update={"source": str(folder), "config": None, "revision": None})
    )
    return PretrainedModel(folder, config, local_model, has_weights=not is_ours)


def _write_tiny_model(folder: Path) -> Path:
    def write(unfinished: Path) -> None:
        config = catalog.find_config(tiny.TOKENIZER)
        Disk().write(unfinished / _CONFIG, json.dumps(config, indent=2).encode() + b"\n")
        tiny.build_tokenizer().save_pretrained(unfinished)

    keep_folder(Disk(), folder, write)
    return folder
