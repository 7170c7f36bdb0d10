"""Files and folders in a job that a run on this machine would read, and cannot: missing, forbidden or unusable ones.

Looks at names and sizes alone, which takes no time. What is in the files is known to the trainer, after its imports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moejob_api.contract.names import CHECKPOINT_MARKER, RunFile
from moejob_api.job import Spec
from moejob_api.job.model import DATA_FILES, SAVED_DATASET, is_place

_CLAIM = "pvc://"
_WEIGHTS, _WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
# One of them lies in a checkpoint of Megatron, or in one iteration of it.
_MEGATRON_FILES = ("latest_checkpointed_iteration.txt", "metadata.json")
# Families differ in what Transformers makes a tokenizer of; each has a file with such a name.
_TOKENIZER_NAMES, _TOKENIZER_ENDINGS = ("tokenizer", "vocab", "merges"), (".model", ".tiktoken")
_AGAIN = "download or copy it again"

_NamedPlace = tuple[str, str, Callable[[Path], str | None]]


def unreadable_sources(spec: Spec) -> Iterator[str]:
    """Yield a sentence for each file or folder of a job that a run on this machine could not read or use."""
    for field, source, find_problem in _named_places(spec):
        problem = None if source.startswith(_CLAIM) else find_problem(Path(source))
        if problem is not None:
            yield f"{field}: {problem}"


def claim_sources(spec: Spec) -> Iterator[str]:
    """Yield a sentence for each source of a job that lies on a claim of a cluster."""
    for field, source, _ in _named_places(spec):
        if source.startswith(_CLAIM):
            yield f"{field}: {source} is a claim of a cluster; on this machine, name a path"


def _named_places(spec: Spec) -> Iterator[_NamedPlace]:
    """Yield field and path of everything that a job reads from disks, with the function that looks at it."""
    model = spec.model
    if is_place(model.source):
        yield "spec.model.source", model.source, _access_problem if model.config else _model_problem
    if model.config is not None and is_place(model.config):
        yield "spec.model.config", model.config, _template_problem
    yield from _data_places(spec)
    for number, reward in enumerate(() if spec.grpo is None else spec.grpo.rewards):
        if reward.module_path is not None:
            yield f"spec.grpo.rewards[{number}].modulePath", reward.module_path, _access_problem
    # Other names are looked for beside the run's folder, which is known to `moejob run` alone.
    resumed = spec.checkpoint.resume_from or ""
    if resumed.startswith((_CLAIM, "/")):
        yield "spec.checkpoint.resumeFrom", resumed, _checkpoint_problem


def _data_places(spec: Spec) -> Iterator[_NamedPlace]:
    for part, datasets in (("train", spec.data.train), ("eval", spec.data.eval)):
        for number, dataset in enumerate(datasets):
            if is_place(dataset.source) or dataset.source.endswith(DATA_FILES):
                yield f"spec.data.{part}[{number}].source", dataset.source, _data_problem


def _access_problem(needed: Path) -> str | None:
    try:
        needed.stat()
    except OSError as error:
        return f"{needed} cannot be read on this machine ({error.strerror}); correct the path, or put it there"
    # A folder needs x beside r: r lists the names in it, x lets them be opened.
    if not os.access(needed, os.R_OK | os.X_OK if needed.is_dir() else os.R_OK):
        return f"{needed} may not be read by this user; change its permissions"
    return None


def _model_problem(folder: Path) -> str | None:
    return _template_problem(folder) or _weights_problem(folder)


def _template_problem(folder: Path) -> str | None:
    """Look for what describes a model: a folder without config.json is none."""
    problem = _access_problem(folder / "config.json")
    if problem is not None:
        return problem
    names = [path.name for path in folder.iterdir()]
    if any(name.startswith(_TOKENIZER_NAMES) or name.endswith(_TOKENIZER_ENDINGS) for name in names):
        return None
    return f"{folder} has no tokenizer; put tokenizer.json and tokenizer_config.json of the model there"


def _weights_problem(folder: Path) -> str | None:
    if any((folder / name).exists() for name in (_WEIGHTS, *_MEGATRON_FILES)):
        return None
    index = folder / _WEIGHTS_INDEX
    if not index.exists():
        return f"{folder} has no weights: neither {_WEIGHTS} nor {_WEIGHTS_INDEX}; {_AGAIN}"
    try:
        missing = [name for name in _indexed_files(index) if not (folder / name).exists()]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{index} cannot be read ({error}); {_AGAIN}"
    return f"{folder} lacks {missing[0]}, which {_WEIGHTS_INDEX} names; {_AGAIN}" if missing else None


def _indexed_files(index: Path) -> Sequence[str]:
    return sorted({*json.loads(index.read_bytes())["weight_map"].values()})


def _checkpoint_problem(folder: Path) -> str | None:
    """Look for a step whose save has ended; what is in it is verified by the trainer."""
    kept = folder if folder.name == RunFile.CHECKPOINTS else folder / RunFile.CHECKPOINTS.value
    problem = _access_problem(folder) or (_access_problem(kept) if kept.is_dir() else None)
    if problem is not None:
        return problem
    if kept.is_dir():
        is_whole = any(kept.glob(f"step-*/{CHECKPOINT_MARKER}"))
        return None if is_whole else f"no step in {kept} has a {CHECKPOINT_MARKER}, so no save ended; name another run"
    if folder.name.startswith("step-"):
        is_whole = (folder / CHECKPOINT_MARKER).exists()
        return None if is_whole else f"{folder} has no {CHECKPOINT_MARKER}, so its save did not end; name another step"
    return f"{folder} has no folder {kept.name}; name the folder of a run, its {kept.name} or one step of these"


def _data_problem(path: Path) -> str | None:
    problem = _access_problem(path)
    if problem is not None:
        return problem
    kinds = ", ".join(DATA_FILES)
    if path.is_file():
        if not path.name.endswith(DATA_FILES):
            return f"{path} is none of {kinds}; convert it, one JSON object a line"
        return None if path.stat().st_size else f"{path} is empty; name a file with records"
    is_saved = any((path / name).exists() for name in SAVED_DATASET)
    if is_saved or any(file.name.endswith(DATA_FILES) for file in path.rglob("*")):
        return None
    return f"folder {path} holds no file that ends in one of {kinds}"
