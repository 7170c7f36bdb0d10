"""A step of groups of any size and rollouts of several rows, reckoned rollout by rollout and token by token in float64.

Nothing of the trainer is used: no arrays of a step, no masks, no documents. A row is written as its authors, `p` for
what the model read and `m` for what it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUMBERS = ("new", "old", "engine", "reference")


@dataclass(frozen=True)
class Episode:
    """A rollout: the authors of each row, its reward, and whether it has no end."""

    rows: tuple[str, ...]
    reward: float
    is_truncated: bool = False


# Groups of 3, 2, 4 and 1 rollouts; rollouts of one to three rows, with tools in the middle of some rows, and three
# without an end: one of two rows, one of one, and one whose group has nothing else in its update.
GROUPS: tuple[tuple[Episode, ...], ...] = (
    (
        Episode(("pmmm",), 1.0),
        Episode(("ppmm", "pppppmmm"), 0.25),
        Episode(("pmppmm",), -0.5),
    ),
    (
        Episode(("ppm", "pppmmmm", "pppppm"), 0.0),
        Episode(("ppmmmmmm",), 2.0, is_truncated=True),
    ),
    (
        Episode(("pmm",), 0.5),
        Episode(("pmmmpm", "pppmmm"), 1.5, is_truncated=True),
        Episode(("ppm", "ppmpm"), -1.0),
        Episode(("pmmmmm",), 0.5),
    ),
    (Episode(("pm", "pppmm"), 0.75),),
)
EPISODES = tuple(episode for group in GROUPS for episode in group)
GROUP_OF = tuple(number for number, group in enumerate(GROUPS) for _ in group)
ROW_OF: tuple[tuple[int, int], ...] = tuple(
    (number, place) for number, episode in enumerate(EPISODES) for place in range(len(episode.rows))
)


@dataclass(frozen=True)
class Settings:
    """The settings of a loss; names and values as in a job."""

    advantage: str
    aggregation: str
    level: str = "Token"
    # Of K1 in the reward.
    coefficient: float = 0.5
    clip_low: float = 0.2
    clip_high: float = 0.3
    most: int = 7
    is_filtered: bool = True
    # Levels of a row, as it is, or of the whole rollout, as it is not.
    ratio_of: str = "row"
    # Largest weight of a mismatch.
    maximum: float = 1.4


@dataclass(frozen=True)
class Numbers:
    """Log-probabilities of each token that the model wrote, of each row; `new` has gradients."""

    rows: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def of(self, name: str, rollout: int) -> list[Tensor]:
        """Return the numbers of each row of a rollout."""
        return [values for values, (owner, _) in zip(self.rows[name], ROW_OF, strict=True) if owner == rollout]


def draw_numbers(seed: int) -> Numbers:
    """Draw numbers that float32 can hold, apart from one another by what clips and bounds."""
    random = np.random.default_rng(seed)
    drawn: dict[str, list[Tensor]] = {name: [] for name in NUMBERS}
    for rollout, place in ROW_OF:
        count = EPISODES[rollout].rows[place].count("m")
        old = random.normal(-2, 0.7, count)
        values = {
            "new": old + random.normal(0, 0.25, count),
            "old": old,
            "engine": old + random.normal(0, 0.3, count),
            "reference": old + random.normal(0, 0.3, count),
        }
        for name, value in values.items():
            drawn[name].append(torch.from_numpy(value.astype(np.float32).astype(np.float64)))
    for new in drawn["new"]:
        new.requires_grad_()
    return Numbers({name: tuple(values) for name, values in drawn.items()})


def reckon_advantages(settings: Settings, numbers: Numbers) -> list[list[list[float]]]:
    """Return the advantage of each token of each row of each rollout."""
    penalties = [
        [
            [-settings.coefficient * (a - b) for a, b in zip(old.tolist(), reference.tolist(), strict=True)]
            for old, reference in zip(numbers.of("old", rollout), numbers.of("reference", rollout), strict=True)
        ]
        for rollout in range(len(EPISODES))
    ]
    if settings.advantage == "ReinforcePlusPlus":
        return _whitened(penalties)
    totals = [
        episode.reward + math.fsum(value for row in rows for value in row)
        for episode, rows in zip(EPISODES, penalties, strict=True)
    ]
    values = []
    for rollout, group in enumerate(GROUP_OF):
        fellows = [totals[other] for other, its_group in enumerate(GROUP_OF) if its_group == group]
        values.append(_compared(settings.advantage, totals[rollout], fellows))
    return [[[value] * len(row) for row in rows] for value, rows in zip(values, penalties, strict=True)]


def _compared(advantage: str, total: float, fellows: Sequence[float]) -> float:
    count = len(fellows)
    if count == 1:
        return 0.0
    mean = math.fsum(fellows) / count
    if advantage == "RLOO":
        return total - (math.fsum(fellows) - total) / (count - 1)
    if advantage == "DrGRPO":
        return total - mean
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in fellows) / (count - 1))
    return (total - mean) / (deviation + 1e-4)


def _whitened(penalties: list[list[list[float]]]) -> list[list[list[float]]]:
    returns = []
    for episode, rows in zip(EPISODES, penalties, strict=True):
        left, backwards = episode.reward, []
        for row in reversed(rows):
            of_row = []
            for value in reversed(row):
                left += value
                of_row.append(left)
            backwards.append(of_row[::-1])
        returns.append(backwards[::-1])
    every = [value for rows in returns for row in rows for value in row]
    mean = math.fsum(every) / len(every)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in every) / len(every)) + 1e-4
    return [[[(value - mean) / deviation for value in row] for row in rows] for rows in returns]


def reckon_loss(settings: Settings, numbers: Numbers, members: Sequence[int]) -> Tensor:
    """Return the loss of an update of these rollouts."""
    advantages = reckon_advantages(settings, numbers)
    losses = {
        rollout: torch.cat(_row_losses(settings, numbers, rollout, advantages[rollout]))
        for rollout in members
        if not (settings.is_filtered and EPISODES[rollout].is_truncated)
    }
    if settings.aggregation == "Token":
        return torch.cat([*losses.values()]).mean()
    if settings.aggregation == "Sequence":
        return torch.stack([values.mean() for values in losses.values()]).mean()
    if settings.aggregation == "Constant":
        return torch.cat([*losses.values()]).sum() / (len(members) * settings.most)
    groups = sorted({GROUP_OF[rollout] for rollout in losses})
    means = [
        torch.cat([values for rollout, values in losses.items() if GROUP_OF[rollout] == group]).mean()
        for group in groups
    ]
    return torch.stack(means).mean()


def _row_losses(
    settings: Settings, numbers: Numbers, rollout: int, advantages: Sequence[Sequence[float]]
) -> list[Tensor]:
    new, old, engine = (numbers.of(name, rollout) for name in ("new", "old", "engine"))
    apart = [now - before for now, before in zip(new, old, strict=True)]
    mismatch = [before - said for before, said in zip(old, engine, strict=True)]
    if settings.level == "Sequence":
        if settings.ratio_of == "rollout":
            apart = [torch.cat(apart).mean().expand(len(row)) for row in apart]
            mismatch = [torch.cat(mismatch).sum().expand(len(row)) for row in mismatch]
        else:
            apart = [row.mean().expand(len(row)) for row in apart]
            mismatch = [row.sum().expand(len(row)) for row in mismatch]
    losses = []
    for row, values, said in zip(apart, advantages, mismatch, strict=True):
        signs, ratios = torch.tensor(values, dtype=torch.float64), row.exp()
        clipped = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        surrogate = torch.minimum(ratios * signs, clipped * signs)
        losses.append(-surrogate * said.exp().clamp(max=settings.maximum))
    return losses


def reckon_gradients(settings: Settings, numbers: Numbers, members: Sequence[int]) -> tuple[float, list[Any]]:
    """Return the loss, and its gradient with respect to the tokens that the model wrote in each row."""
    loss = reckon_loss(settings, numbers, members)
    # Rollouts that are left out, and those of other updates, have zeros.
    gradients = torch.autograd.grad(loss, numbers.rows["new"], materialize_grads=True)
    return float(loss.detach()), [gradient.numpy() for gradient in gradients]
