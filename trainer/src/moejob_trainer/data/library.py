"""Data sets that the datasets library reads: of the hub, and folders that it wrote. Importing it takes two seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import datasets
import pyarrow as pa

from moejob_api.job.model import Dataset
from moejob_trainer.data.records import Record, without_absent
from moejob_trainer.errors import BadData


def saved(folder: Path, split: str) -> Iterator[Record]:
    """Records of a folder that the library wrote."""
    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise BadData(f"data set {folder} cannot be read: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise BadData(f"data set {folder} has no split {split}; it has {', '.join(sorted(found)) or 'none'}")
        found = found[split]
    return _entries(found, str(folder))


def of_hub(dataset: Dataset, commit: str | None) -> Iterator[Record]:
    """Records of a data set on the hub."""
    try:
        found = datasets.load_dataset(
            dataset.source,
            dataset.configuration,
            split=dataset.split,
            revision=commit,
            streaming=dataset.streaming,
        )
    # Covers no network, no such name, no such split, and files that the library cannot read.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        configuration = f"configuration {dataset.configuration}, " if dataset.configuration else ""
        raise BadData(
            f"data set {dataset.source} ({configuration}split {dataset.split}) cannot be loaded: {reason}; check the "
            "names, or download it to the volume and name its path"
        ) from error
    return _entries(found, f"{dataset.source}[{dataset.split}]")


def _entries(found: Iterable[Mapping[str, object]], name: str) -> Iterator[Record]:
    number = 0
    try:
        for fields in found:
            number += 1
            yield Record(without_absent(fields), f"{name}, row {number}")
    # Streamed files are first read here. A failing network is no error of the file, so it is not caught.
    except (pa.ArrowInvalid, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadData(f"{name} cannot be read after row {number}: {reason}; correct the file") from error
