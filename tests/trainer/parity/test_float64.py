"""Distance from float64 of an update of the trainer, beside that of an update of Transformers in the same type.

Two programs in float32 that agree with each other may share an error, and where they differ nothing says which one is
nearer. Transformers in float64, norms, softmax and rotations included, is the number that both round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moejob_api.models.shape import Family
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from real_models import DENSE, find_real_model
from trainer.parity.cells import Cell, make_documents, make_loss, micro_batches, run_backward, start_engine
from trainer.worlds import Worlds

# The order of sums explains a factor of two, and a sum that is kept in too narrow a type is further away.
MOST = 2.0


@dataclass(frozen=True)
class UpdateNumbers:
    """Numbers of the first update: log-probabilities of each document, the loss, and the norm of the gradients."""

    log_probabilities: Mapping[int, Any]
    loss: float
    norm: float

    def distances(self, exact: UpdateNumbers) -> dict[str, float]:
        """Return the distance of each from exact ones."""
        pairs = [(self.log_probabilities[number], values) for number, values in exact.log_probabilities.items()]
        return {
            "log-probabilities": float(np.sqrt(np.mean(np.concatenate([a - b for a, b in pairs]) ** 2))),
            "loss": abs(self.loss - exact.loss),
            "gradient norm, relative": abs(self.norm / exact.norm - 1),
        }


@contextmanager
def float32_as_float64() -> Iterator[None]:
    """Let Transformers' own conversions to float32, of norms and rotations, be conversions to float64."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def measure_transformers(folder: Path, dtype: torch.dtype) -> UpdateNumbers:
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = config._experts_implementation = "eager"  # noqa: SLF001 how Transformers takes it
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    documents, found = make_documents(0), {}
    for document in documents:
        tokens = torch.from_numpy(document.tokens)
        with torch.no_grad():
            logits = model(tokens[None], use_cache=False).logits[0, :-1]
        assert logits.dtype is dtype
        found[document.id] = logits.double().log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()
    loss = run_backward(model, documents)
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return UpdateNumbers(found, loss, float(torch.stack(squares).sum().sqrt()))


def measure_trainer(cell: Cell, folder: Path) -> UpdateNumbers:
    use_cpu()
    try:
        engine = start_engine(cell, folder)
        batches, found = micro_batches(cell, engine, 0), {}
        documents = make_documents(0)
        for batch, outputs in zip(batches, engine.compute_outputs(batches), strict=True):
            places = zip(batch.cu_lengths.tolist(), batch.lengths, batch.documents, strict=False)
            for start, length, document in places:
                if length:
                    values = outputs.log_probabilities[start : start + length - 1]
                    found[documents[document].id] = values.double().numpy().copy()
        result = engine.update(batches, make_loss(cell, engine))
        return UpdateNumbers(found, result.loss, result.gradient_norm)
    finally:
        stop_groups()


@pytest.mark.slow
@pytest.mark.thorough
def test_an_update_in_float32_is_as_near_to_float64_as_that_of_transformers(worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to(find_real_model(DENSE))
    [ours] = worlds.run(1, measure_trainer, Cell(Family.LLAMA, {}), tmp_path)
    theirs = measure_transformers(tmp_path / "first", torch.float32)
    wide = torch.float64
    with float32_as_float64():
        exact = measure_transformers(tmp_path / "first", wide)
    assert {*ours.log_probabilities} == {*exact.log_probabilities}
    of_ours, of_theirs = ours.distances(exact), theirs.distances(exact)
    # A sum of theirs may be right by chance.
    bounds = {name: MOST * max(value, 1e-6) for name, value in of_theirs.items()}
    assert {name: value for name, value in of_ours.items() if value > bounds[name]} == {}, (of_ours, of_theirs)
