"""Data sets that the datasets library reads: of the hub, and folders that it wrote. Importing it takes two seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import datasets
import pyarrow as pa

from moejob_api.job.model import Dataset
from moejob_trainer.data.records import Record, remove_absent_fields
from moejob_trainer.errors import BadData


def read_saved_dataset(folder: Path, split: str) -> Iterator[Record]:
    """Records of a folder that the library wrote."""
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise BadData(f"data set {folder} cannot be read: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise BadData(f"data set {folder} has no split {split}; it has {', '.join(sorted(dataset)) or 'none'}")
        dataset = dataset[split]
    return _read_rows(dataset, str(folder))


def read_hub_dataset(dataset: Dataset, commit: str | None) -> Iterator[Record]:
    """Records of a data set on the hub."""
    try:
        rows = datasets.load_dataset(
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
    return _read_rows(rows, f"{dataset.source}[{dataset.split}]")


def _read_rows(rows: Iterable[Mapping[str, object]], name: str) -> Iterator[Record]:
    number = 0
    try:
        for fields in rows:
            number += 1
            yield Record(remove_absent_fields(fields), f"{name}, row {number}")
    # Streamed files are first read here. A failing network is no error of the file, so it is not caught.
    except (pa.ArrowInvalid, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadData(f"{name} cannot be read after row {number}: {reason}; correct the file") from error
