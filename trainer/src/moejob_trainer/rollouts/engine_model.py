"""The folder that engines start from: config, tokenizer and code of the model, and no weights.

Its name appears when it is complete. Engines wait for it, so it is laid out before ranks read their own weights.
"""

from __future__ import annotations

from pathlib import Path

import torch

from moejob_api.models.shape import ModelShape
from moejob_trainer.conversion.templates import copy_config_and_tokenizer
from moejob_trainer.runtime.disk import Disk, keep_folder


def lay_out_model(pretrained: Path, folder: Path, shape: ModelShape, dtype: torch.dtype) -> None:
    """Write config, tokenizer and code of the model; a folder of an earlier start stays if its files are the same."""
    keep_folder(
        Disk(), folder, lambda unfinished_folder: copy_config_and_tokenizer(pretrained, unfinished_folder, shape, dtype)
    )
