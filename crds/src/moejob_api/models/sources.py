"""The sources of a model's config.json without a network: a path, the local Hugging Face cache, the shipped catalog.

Reads files and never writes one. What a config means is for moejob_api.models.families to say.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.models.reader import model_error, shown_value
from moejob_api.models.shape import ModelShape
from moejob_api.problems import Rule

# The largest published config.json (with quantization tables) has 100 kB; parsing anything near this takes under 0.1 s.
LARGEST_CONFIG_BYTES = 4 * 1024 * 1024

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_COMMIT_OR_BRANCH = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A config.json that was found, and where."""

    origin: str
    config: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class UnseenModel:
    """The reason why a model cannot be read from here; `near` are known names that resemble the one asked for."""

    reason: str
    near: tuple[str, ...] = ()


def model_shape(
    source: str,
    revision: str | None = None,
    *,
    local_paths: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> ModelShape | UnseenModel:
    """The shape of the model that a job names; InvalidSpec when its config can be seen and is wrong."""
    model_config = read_model_config(source, revision, local_paths=local_paths, environment=environment)
    if isinstance(model_config, UnseenModel):
        return model_config
    return shape_of(model_config.config, model_config.origin)


def read_model_config(
    source: str,
    revision: str | None = None,
    *,
    local_paths: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> ModelConfig | UnseenModel:
    """The config.json of spec.model.source.

    `local_paths` is False where this disk is not the job's, as in the operator: a path then names nothing here, and
    must not be opened, for its author may not read this disk.
    """
    if source.startswith("pvc://"):
        return UnseenModel(f"{source} lies on a volume, which cannot be read from here")
    if _is_path(source, local_paths):
        return _config_from_path(Path(source)) if local_paths else UnseenModel(f"{source} is a path on another machine")
    if _HUB_NAME.fullmatch(source) is None or ".." in source:
        raise model_error(
            Rule.MODEL_CONFIG,
            f"{shown_value(source)} is neither a Hugging Face name (organization/model) nor pvc://claim/path; "
            f"begin a path with / or ./{_name_hint(catalog.similar_names(source))}",
        )
    return _config_from_cache(source, revision, environment) or _config_from_catalog(source)


def _is_path(source: str, local_paths: bool) -> bool:
    if source in {".", ".."} or source.startswith(("/", "./", "../")):
        return True
    return local_paths and source != "" and _file_mode(Path(source)) is not None


def _config_from_path(path: Path) -> ModelConfig | UnseenModel:
    if _file_mode(path) is None:
        # An absolute path may lie in the image or on the volume; a relative one may be the export of a run to come.
        where = "the image or the volume" if path.is_absolute() else "the folder that the job is run from"
        return UnseenModel(f"{shown_value(str(path))} is not on this machine; {where} has to have it")
    file = path / "config.json" if stat.S_ISDIR(_file_mode(path) or 0) else path
    mode = _file_mode(file)
    if mode is None:
        raise model_error(
            Rule.MODEL_CONFIG,
            f"there is no {file} that can be read; name a folder with a config.json, that file itself, "
            "or a Hugging Face name",
        )
    if not stat.S_ISREG(mode):
        raise model_error(Rule.MODEL_CONFIG, f"{file} is not a regular file; name the folder that holds config.json")
    return ModelConfig(str(file), _parse_config(file))


def _file_mode(path: Path) -> int | None:
    """Return the mode of a path; None where nothing is seen: it is wrong, forbidden or not valid."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return None


def _config_from_cache(name: str, revision: str | None, environment: Mapping[str, str]) -> ModelConfig | None:
    wanted = revision or "main"
    if _COMMIT_OR_BRANCH.fullmatch(wanted) is None or ".." in wanted:
        return None
    folder = _hub_cache(environment) / f"models--{name.replace('/', '--')}"
    file = folder / "snapshots" / _cached_commit(folder, wanted) / "config.json"
    return ModelConfig(str(file), _parse_config(file)) if stat.S_ISREG(_file_mode(file) or 0) else None


def _hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder of huggingface_hub's models, by the variables it honours, in its order."""
    stated = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    if stated:
        return Path(stated).expanduser()
    home = environment.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _cached_commit(folder: Path, revision: str) -> str:
    """The commit that a branch or tag points to in the cache; a revision without such an entry is a commit itself."""
    try:
        return (folder / "refs" / revision).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return revision


def _config_from_catalog(name: str) -> ModelConfig | UnseenModel:
    # The revision is not compared: the revisions of a published model differ in weights and texts, not in architecture.
    config = catalog.find_config(name)
    if config is not None:
        return ModelConfig(f"shipped config.json of {name}", config)
    near = catalog.similar_names(name)
    return UnseenModel(
        f"{name} is neither in the Hugging Face cache of this machine nor known to moejob{_name_hint(near)}", near
    )


def _name_hint(near: tuple[str, ...]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _parse_config(file: Path) -> Mapping[str, object]:
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_CONFIG_BYTES + 1)
    except OSError as error:
        raise model_error(Rule.MODEL_CONFIG, f"{file} cannot be read: {error.strerror}") from error
    if len(content) > LARGEST_CONFIG_BYTES:
        raise model_error(Rule.MODEL_CONFIG, f"{file} is larger than 4 MiB; a model's config.json never is")
    try:
        config = json.loads(content.decode("utf-8-sig"))
    # ValueError is all of: not UTF-8, not JSON, and a number of more digits than Python reads.
    except (ValueError, RecursionError) as error:
        raise model_error(Rule.MODEL_CONFIG, f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise model_error(Rule.MODEL_CONFIG, f"{file} holds {shown_value(config)}; expected a JSON object")
    return config
