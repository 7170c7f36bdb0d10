"""A small checkpoint as torch's own writer writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moejob_trainer.interchange.torch_dist import IndexedKey, PlannedTensor, StackSizes, write_checkpoint

WEIGHT = "decoder.layers.mlp.linear_fc1.weight"
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three layers of one stacked weight in bfloat16, and an embedding in float32."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    layers = [
        PlannedTensor(
            IndexedKey(WEIGHT, (layer,)),
            (4, 3),
            torch.bfloat16,
            lambda layer=layer: torch.full((4, 3), layer + 0.5, dtype=torch.bfloat16),  # type: ignore[misc]
        )
        for layer in range(3)
    ]
    embedding = PlannedTensor(IndexedKey(EMBEDDING), (5, 3), torch.float32, lambda: torch.arange(15.0).reshape(5, 3))
    write_checkpoint(folder, [*layers, embedding], StackSizes(3, 0, are_layers_stacked=True))
    return folder
