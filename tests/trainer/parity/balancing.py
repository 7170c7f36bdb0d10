"""Training with load balancing by hand: Transformers in float64, and the losses' definitions on its routers.

Written from the definitions alone: nothing of the trainer's routing is used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moejob_api.models.shape import Family
from trainer.parity.cells import (
    StepMeasurements,
    descend_gradients,
    make_documents,
    parameter_groups,
    reference_model,
    save_gradients,
)

# Every layout packs them into other micro batches.
LENGTHS = (9, 17, 5, 25, 13, 29, 21, 2)
# Choices fall on few experts otherwise, and groups would hide a mistake.
UNGROUPED: dict[str, Any] = {"n_group": 1, "topk_group": 1}


@dataclass(frozen=True)
class Rules:
    """Settings of load balancing."""

    family: Family = Family.QWEN3_MOE
    loss: str = "AuxLoss"
    coefficient: float = 0.0
    z_coefficient: float = 0.0
    bias_rate: float = 0.0


@dataclass(frozen=True)
class Choices:
    """Output of one router for one document."""

    logits: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class Expected:
    """Measurements of each step, and the final biases on the choice, by layer."""

    steps: StepMeasurements
    selection_biases: list[list[float]]


class WatchedModel:
    """A model whose routers are listened to."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.routers: list[Any] = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self._heard: list[Choices] = []
        for router in self.routers:
            router.register_forward_hook(self._record_choices)

    def _record_choices(self, _module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._heard.append(Choices(output[0], output[2]))

    @contextmanager
    def listen_to_routers(self) -> Iterator[list[Choices]]:
        """Collect the choices of routers from now on, one after the other."""
        self._heard = []
        yield self._heard

    def run_document(self, tokens: Tensor) -> tuple[Tensor, list[Choices]]:
        """Logits of a document, and what each router chose for it."""
        with self.listen_to_routers() as heard:
            logits = self.model(tokens[None], use_cache=False).logits[0]
        return logits, heard


def write_balanced_reference(rules: Rules, folder: Path) -> Expected:
    """Trains by the rules. Leaves behind what `write_reference` does."""
    model = reference_model(rules.family, **UNGROUPED)
    model.save_pretrained(folder / "first")
    model.double()
    watched = WatchedModel(model)
    losses, balancing = [], []

    def backward(step: int) -> None:
        loss, balance, choices = _step_losses(watched, rules, step)
        (loss + balance).backward()
        losses.append(loss.item())
        balancing.append(balance.item())
        move_biases(watched, choices, rules.bias_rate)

    norms = descend_gradients(
        parameter_groups(model), backward, lambda: save_gradients(model, folder / "gradients", model.save_pretrained)
    )
    model.save_pretrained(folder / "last")
    biases = [getattr(router, "e_score_correction_bias", torch.zeros(0)).tolist() for router in watched.routers]
    return Expected(StepMeasurements(tuple(losses), norms, tuple(balancing)), biases)


def _step_losses(watched: WatchedModel, rules: Rules, step: int) -> tuple[Tensor, Tensor, list[list[Choices]]]:
    batch = make_documents(step, LENGTHS)
    weight = sum(float(document.weights[1:].sum()) for document in batch)
    loss, said = torch.zeros((), dtype=torch.float64), []
    for document in batch:
        tokens = torch.from_numpy(document.tokens)
        logits, choices = watched.run_document(tokens)
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        loss = loss + (losses * torch.from_numpy(document.weights[1:])).sum() / weight
        said.append(choices)
    by_layer = [[of_document[layer] for of_document in said] for layer in range(len(watched.routers))]
    return loss, balancing_loss(rules, by_layer), by_layer


def balancing_loss(rules: Rules, by_layer: Sequence[Sequence[Choices]]) -> Tensor:
    """The balancing losses of all layers, given what each chose for each document."""
    return sum((_balancing_losses(rules, layer) for layer in by_layer), torch.zeros((), dtype=torch.float64))


def _balancing_losses(rules: Rules, said: Sequence[Choices]) -> Tensor:
    """The balancing losses of one layer, given what it chose for each document that is long enough for it."""
    said = [one for one in said if len(one.logits)]
    lengths = torch.tensor([len(one.logits) for one in said], dtype=torch.float64)
    match rules.loss:
        case "AuxLoss":
            mean = (lengths * _by_document(rules, said)).sum() / lengths.sum()
        case "SeqAuxLoss":
            mean = _by_document(rules, said).mean()
        case _:
            mean = _switch(rules, said)
    squares = torch.cat([one.logits for one in said]).logsumexp(-1).square().mean()
    return rules.coefficient * mean + rules.z_coefficient * squares


def _by_document(rules: Rules, said: Sequence[Choices]) -> Tensor:
    return torch.stack([_switch(rules, [one]) for one in said])


def _switch(rules: Rules, said: Sequence[Choices]) -> Tensor:
    """E times the sum over experts of the share of choices that fell on it times its mean score."""
    logits = torch.cat([one.logits for one in said])
    experts = logits.shape[1]
    scores = logits.softmax(-1)
    if rules.family is Family.DEEPSEEK_V3:
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    chosen = torch.cat([one.chosen.flatten() for one in said])
    shares = torch.bincount(chosen, minlength=experts) / len(chosen)
    return experts * (shares * scores.mean(0)).sum()


def move_biases(watched: WatchedModel, choices: Sequence[Sequence[Choices]], rate: float) -> None:
    """Makes experts that got too much less likely to be chosen, and the others more."""
    for router, said in zip(watched.routers, choices, strict=True):
        if rate:
            chosen = torch.cat([one.chosen.flatten() for one in said])
            counts = torch.bincount(chosen, minlength=router.num_experts).double()
            router.e_score_correction_bias += rate * (counts.mean() - counts).sign()
