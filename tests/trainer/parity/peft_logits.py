"""Runs where PEFT is: what a model says with an adapter folder, as PEFT reads it, and what it says merged.

    python peft_logits.py FOLDER...

Each folder holds first/, published/ and merged/; logits.safetensors is the answer.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main(folders: list[str]) -> None:
    """Writes the logits of all three for every folder."""
    # Adapters without a place, and places without an adapter, are but a warning to PEFT.
    warnings.filterwarnings("error", message="Found missing adapter keys")
    tokens = torch.arange(3, 33)[None]
    for folder in map(Path, folders):
        with torch.no_grad():
            logits = {name: _loaded(folder / name)(tokens).logits for name in ("first", "merged")}
            adapted = PeftModel.from_pretrained(_loaded(folder / "first"), str(folder / "published"))
            save_file(logits | {"adapted": adapted(tokens).logits}, folder / "logits.safetensors")


def _loaded(folder: Path) -> Any:
    # Not the grouped one, which wants wider rows than a small model has.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


if __name__ == "__main__":
    main(sys.argv[1:])
