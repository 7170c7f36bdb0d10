"""The folder that engines start from: config, tokenizer and code of the model, and no weights.

Its name appears when it is complete. Engines wait for it, so it is laid out before ranks read their own weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from moejob_api.models.shape import ModelShape
from moejob_trainer.conversion.templates import copy_beside


def lay_out(pretrained: Path, folder: Path, shape: ModelShape, dtype: torch.dtype) -> None:
    """Lay out the model of a job; where an earlier start of the job has done so, it is the same."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    copy_beside(pretrained, unfinished, shape, dtype)
    unfinished.rename(folder)
