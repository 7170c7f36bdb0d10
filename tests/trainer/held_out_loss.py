"""Transformers' own mean loss of an export, document after document, without padding.

    python tests/trainer/held_out_loss.py EXPORT CORPUS

The reference for the loss that a run reports of its last evaluation; none of the trainer's model code is here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def held_out_loss(export: Path, corpus: Path) -> float:
    """The mean over all tokens that are trained on, each predicted from those before it in its document."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    model, loading = loaded
    unloaded = [name for names in loading.values() for name in names]
    if unloaded:
        raise ValueError(f"{export} is not the whole of its model, or more: {unloaded}")
    lengths = np.load(corpus / "sizes.npy").reshape(-1, 3)[:, 0]
    ends = np.cumsum(lengths)[:-1]
    tokens = np.split(np.fromfile(corpus / "tokens.bin", np.int32).astype(np.int64), ends)
    trained = np.split(np.fromfile(corpus / "trained.bin", np.bool_), ends)
    losses = [
        _losses(model, torch.from_numpy(document))[mask[1:]] for document, mask in zip(tokens, trained, strict=True)
    ]
    return float(torch.cat(losses).mean())


@torch.no_grad()
def _losses(model: Any, document: torch.Tensor) -> torch.Tensor:
    """Of every token but the first. document: [sequence]."""
    logits = model(document[None]).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.double(), document[1:], reduction="none")


if __name__ == "__main__":
    sys.stdout.write(f"{held_out_loss(Path(sys.argv[1]), Path(sys.argv[2]))!r}\n")
