"""What balancing does to training, by hand: Transformers in float64, and the definitions of the losses on its routers.

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
from trainer.parity.cells import Steps, descended, documents, parameter_groups, reference_model, save_gradients

# In steps of more than any padding, so that every layout makes the same micro batches of them: two documents each.
LENGTHS = (9, 17, 5, 25, 13, 29, 21, 2)
MICRO_BATCHES = ((5, 3), (6, 1), (4, 0), (2, 7))
# Choices fall on few experts otherwise, and groups would hide a mistake.
UNGROUPED: dict[str, Any] = {"n_group": 1, "topk_group": 1}


@dataclass(frozen=True)
class Rules:
    """What is done about the load. `turns`: which micro batches are worked on at the same time."""

    family: Family = Family.QWEN3_MOE
    loss: str = "AuxLoss"
    coefficient: float = 0.0
    z_coefficient: float = 0.0
    bias_rate: float = 0.0
    turns: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (3,))


@dataclass(frozen=True)
class Choices:
    """What one router said about one document."""

    logits: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class Expected:
    """What was measured at each step, and where the biases on the choice ended up, by layer."""

    steps: Steps
    selection_biases: list[list[float]]


class Watched:
    """A model whose routers are listened to."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.routers: list[Any] = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self._heard: list[Choices] = []
        for router in self.routers:
            router.register_forward_hook(self._hear)

    def _hear(self, _module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._heard.append(Choices(output[0], output[2]))

    @contextmanager
    def listening(self) -> Iterator[list[Choices]]:
        """What routers choose from now on, one after the other."""
        self._heard = []
        yield self._heard

    def said(self, tokens: Tensor) -> tuple[Tensor, list[Choices]]:
        """Logits of a document, and what each router chose for it."""
        with self.listening() as heard:
            logits = self.model(tokens[None], use_cache=False).logits[0]
        return logits, heard


def write_balanced_reference(rules: Rules, folder: Path) -> Expected:
    """Trains by the rules. Leaves behind what `write_reference` does."""
    model = reference_model(rules.family, **UNGROUPED)
    model.save_pretrained(folder / "first")
    model.double()
    watched = Watched(model)
    losses, balancing = [], []

    def backward(step: int) -> None:
        loss, balance, choices = _losses(watched, rules, step)
        (loss + balance).backward()
        losses.append(loss.item())
        balancing.append(balance.item())
        move_biases(watched, choices, rules.bias_rate)

    norms = descended(parameter_groups(model), backward, lambda: save_gradients(model, folder / "gradients"))
    model.save_pretrained(folder / "last")
    biases = [getattr(router, "e_score_correction_bias", torch.zeros(0)).tolist() for router in watched.routers]
    return Expected(Steps(tuple(losses), norms, tuple(balancing)), biases)


def _losses(watched: Watched, rules: Rules, step: int) -> tuple[Tensor, Tensor, list[list[Choices]]]:
    batch = documents(step, LENGTHS)
    weight = sum(float(document.weights[1:].sum()) for document in batch)
    loss, said = torch.zeros((), dtype=torch.float64), []
    for document in batch:
        tokens = torch.from_numpy(document.tokens)
        logits, choices = watched.said(tokens)
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        loss = loss + (losses * torch.from_numpy(document.weights[1:])).sum() / weight
        said.append(choices)
    by_layer = [[of_document[layer] for of_document in said] for layer in range(len(watched.routers))]
    return loss, balancing_loss(rules, by_layer), by_layer


def balancing_loss(rules: Rules, by_layer: Sequence[Sequence[Choices]]) -> Tensor:
    """The balancing losses of all layers, given what each chose for each document."""
    return sum((_balance(rules, layer) for layer in by_layer), torch.zeros((), dtype=torch.float64))


def _balance(rules: Rules, said: Sequence[Choices]) -> Tensor:
    """The balancing losses of one layer, given what it chose for each document."""
    parts = {"AuxLoss": _by_micro_batch, "SeqAuxLoss": _by_document, "GlobalAuxLoss": _by_turn}
    means = list(parts[rules.loss](rules, said))
    squares = [
        torch.cat([said[place].logits for place in places]).logsumexp(-1).square().mean() for places in MICRO_BATCHES
    ]
    balance = rules.coefficient * sum(means) / len(means) + rules.z_coefficient * sum(squares) / len(squares)
    assert isinstance(balance, Tensor)
    return balance


def _by_micro_batch(rules: Rules, said: Sequence[Choices]) -> Iterator[Tensor]:
    for places in MICRO_BATCHES:
        yield _switch(rules, [said[place] for place in places], [said[place] for place in places])


def _by_document(rules: Rules, said: Sequence[Choices]) -> Iterator[Tensor]:
    for places in MICRO_BATCHES:
        ones = [_switch(rules, [said[place]], [said[place]]) for place in places]
        yield torch.stack(ones).mean()


def _by_turn(rules: Rules, said: Sequence[Choices]) -> Iterator[Tensor]:
    so_far: list[Choices] = []
    for turn in rules.turns:
        now = [said[place] for number in turn for place in MICRO_BATCHES[number]]
        so_far = so_far + now
        yield _switch(rules, now, so_far)


def _switch(rules: Rules, scored: Sequence[Choices], counted: Sequence[Choices]) -> Tensor:
    """E times the sum over experts of the share of choices that fell on it times its mean score."""
    logits = torch.cat([one.logits for one in scored])
    experts = logits.shape[1]
    scores = logits.softmax(-1)
    if rules.family is Family.DEEPSEEK_V3:
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    chosen = torch.cat([one.chosen.flatten() for one in counted])
    shares = torch.bincount(chosen, minlength=experts) / len(chosen)
    return experts * (shares * scores.mean(0)).sum()


def move_biases(watched: Watched, choices: Sequence[Sequence[Choices]], rate: float) -> None:
    """Makes experts that got too much less likely to be chosen, and the others more."""
    for router, said in zip(watched.routers, choices, strict=True):
        if rate:
            chosen = torch.cat([one.chosen.flatten() for one in said])
            counts = torch.bincount(chosen, minlength=router.num_experts).double()
            router.e_score_correction_bias += rate * (counts.mean() - counts).sign()
