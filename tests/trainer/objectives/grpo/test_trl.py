"""The loss of GRPO and its gradient against TRL's on the same tensors, however these are packed and cut."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moejob_api.job.grpo import AdvantageEstimator, Grpo
from moejob_trainer.data.packing import BatchPlan, build_global_batch
from moejob_trainer.objectives.grpo.loss import (
    ADVANTAGE,
    ENGINE,
    OLD,
    REFERENCE,
    SCALE,
    compute_token_weights,
    grpo_loss,
)
from moejob_trainer.training.interface import TokenOutputs
from moejob_trainer.training.micro_batch import Document
from trainer.objectives.grpo.by_hand import full_group_advantages
from trainer.training_data import total_loss_weight

PYTHON = Path(__file__).parents[4] / ".venv/trl/bin/python"
GROUPS, MEMBERS, PROMPT, MOST = 3, 4, 2, 9
LENGTHS = (1, 9, 4, 7, 2, 2, 5, 8, 3, 6, 9, 1)

TRUNCATED = {"mode": "token_truncate", "maximum": 1.1}
# TRL's settings, and ours for the same. Its epsilon_high of CISPO is the bound itself.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean over tokens": ({}, {}),
    "clip higher": ({"high": 0.28}, {"clipHigh": 0.28}),
    "dual clip": ({"delta": 1.3}, {"dualClip": 1.3}),
    "mean over answers": ({"loss": "grpo"}, {"lossAggregation": "Sequence"}),
    "constant": (
        {"loss": "dr_grpo", "scale": "none"},
        {"lossAggregation": "Constant", "advantage": "DrGRPO"},
    ),
    "ratios of sequences": (
        {"loss": "grpo", "level": "sequence", "low": 3e-2, "high": 4e-2},
        {"lossAggregation": "Sequence", "importance": "Sequence", "clipLow": 3e-2, "clipHigh": 4e-2},
    ),
    "CISPO": (
        {"loss": "cispo", "low": 1.0, "high": 1.2},
        {"policyLoss": "CISPO", "clipLow": 1.0, "clipHigh": 0.2},
    ),
    "divergence": ({"beta": 0.3}, {"kl": {"coefficient": 0.3}}),
    "entropy": ({"bonus": 0.3}, {"entropyCoefficient": 0.3}),
    "truncated importance sampling": (TRUNCATED, {"mismatch": {"maximum": 1.1}}),
    "truncated importance sampling of sequences": (
        {"mode": "sequence_truncate", "maximum": 1.1},
        {"mismatch": {"level": "Sequence", "maximum": 1.1}},
    ),
    "masked importance sampling": (
        {"mode": "token_mask", "maximum": 1.1, "minimum": 0.9},
        {"mismatch": {"mode": "Mask", "maximum": 1.1, "minimum": 0.9}},
    ),
    "masked importance sampling of sequences": (
        {"mode": "sequence_mask", "maximum": 1.1, "minimum": 0.5},
        {"mismatch": {"level": "Sequence", "mode": "Mask", "maximum": 1.1, "minimum": 0.5}},
    ),
    "everything": (
        {"loss": "grpo", "delta": 1.3, "beta": 0.1, **TRUNCATED},
        {"lossAggregation": "Sequence", "dualClip": 1.3, "kl": {"coefficient": 0.1}, "mismatch": {"maximum": 1.1}},
    ),
}
DEFAULTS: dict[str, Any] = {
    "loss": "dapo",
    "level": "token",
    "low": 0.2,
    "high": 0.2,
    "delta": None,
    "beta": 0.0,
    "bonus": 0.0,
    "scale": "group",
    "mode": None,
    "minimum": None,
    "maximum": None,
    "members": MEMBERS,
    "most": MOST,
}


def _tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)

    def drawn(scale: float) -> Tensor:
        return torch.randn(len(LENGTHS), MOST, generator=random, dtype=torch.float64) * scale

    old = drawn(1.0) - 3
    mask = (torch.arange(MOST) < torch.tensor(LENGTHS)[:, None]).long()
    rewards = torch.rand(len(LENGTHS), generator=random, dtype=torch.float64)
    others = {"new": old + drawn(0.2), "engine": old + drawn(0.1), "reference": old + drawn(0.3)}
    return {"old": old, "mask": mask, "rewards": rewards, "entropy": drawn(1.0).abs(), **others}


@pytest.fixture(scope="module")
def by_trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trl")
    torch.save({name: {**DEFAULTS, **_tensors(), **theirs} for name, (theirs, _) in CASES.items()}, folder / "cases")
    script = Path(__file__).with_name("trl_losses.py")
    done = subprocess.run(
        [PYTHON, script, folder / "cases", folder / "found"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found")


def _settings(ours: dict[str, Any]) -> Grpo:
    written = {"rewards": [{"name": "math"}], "maxNewTokens": MOST, "groupSize": MEMBERS, **ours}
    return Grpo.model_validate_json(json.dumps(written))


PACKED = BatchPlan(data=1, tokens=10_000)
PLANS = {
    "one micro batch": PACKED,
    "many micro batches": BatchPlan(data=1, tokens=16),
    "three ranks": BatchPlan(data=3, tokens=16),
    "padding": BatchPlan(data=2, tokens=64, packing=False, documents=3, multiple=8),
}


def _documents(grpo: Grpo) -> tuple[list[Document], list[Any]]:
    found = {name: tensor.numpy() for name, tensor in _tensors().items()}
    rewards = found["rewards"].reshape(GROUPS, MEMBERS)
    learned = full_group_advantages(grpo.advantage, rewards, [np.zeros(length) for length in LENGTHS])
    weighed = compute_token_weights(grpo.loss_aggregation, LENGTHS, [n // MEMBERS for n in range(len(LENGTHS))], MOST)
    documents = []
    for number, length in enumerate(LENGTHS):

        def placed(values: Any, length: int = length) -> Any:
            return np.concatenate([np.full(PROMPT, np.nan), values[:length]])

        extras = {
            ADVANTAGE: placed(learned[number]),
            ENGINE: placed(found["engine"][number]),
            OLD: placed(found["old"][number]),
            SCALE: np.array(weighed.scale),
            "new": placed(found["new"][number]),
            "entropy": placed(found["entropy"][number]),
        }
        if grpo.kl.coefficient:
            extras[REFERENCE] = placed(found["reference"][number])
        counted = np.r_[np.zeros(PROMPT), np.full(length, weighed.tokens[number])]
        documents.append(Document(np.ones(PROMPT + length, np.int64), counted.astype(np.float64), number, 0, extras))
    return documents, learned


def _ours(grpo: Grpo, plan: BatchPlan) -> tuple[float, Any, Any]:
    """The loss of the global batch, and its gradients as TRL has them: [answers, tokens]."""
    documents, _ = _documents(grpo)
    weight, total = total_loss_weight(documents), 0.0
    gradients = np.zeros((2, len(LENGTHS), MOST))
    for batch in (batch for of_rank in build_global_batch(documents, plan) for batch in of_rank):
        new, entropy = leaves = [batch.extras[name].clone().requires_grad_() for name in ("new", "entropy")]
        terms = grpo_loss(grpo, TokenOutputs(new, entropy), batch)
        (terms.total / weight).backward()
        total += float(terms.total.detach()) / weight
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        for start, length, number in zip(batch.cu_lengths.tolist(), batch.lengths, batch.documents, strict=False):
            if length:
                # The label of the last token of the prompt is the first of the answer.
                own = slice(start + PROMPT - 1, start + length - 1)
                gradients[:, number, : length - PROMPT] = [one[own].numpy() for one in found]
    return total, gradients[0], gradients[1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", PLANS)
def test_loss_and_gradient_are_those_of_trl(by_trl: Any, case: str, plan: str) -> None:
    loss, gradient, of_entropy = _ours(_settings(CASES[case][1]), PLANS[plan])
    # Weights travel as float32.
    assert loss == pytest.approx(float(by_trl[case]["loss"]), abs=1e-7)
    np.testing.assert_allclose(gradient, by_trl[case]["gradient"].numpy(), rtol=1e-6, atol=1e-8)
    assert np.abs(gradient).max() > 1e-3
    if case == "entropy":
        np.testing.assert_allclose(of_entropy, by_trl[case]["of_entropy"].numpy(), rtol=1e-6, atol=1e-8)
        assert of_entropy.min() < -1e-3


@pytest.mark.parametrize("case", ["mean over tokens", "constant"])
def test_advantages_are_those_of_trl(by_trl: Any, case: str) -> None:
    _, learned = _documents(_settings(CASES[case][1]))
    expected = by_trl[case]["advantages"].tolist()
    assert [float(value[0]) for value in learned] == pytest.approx(expected, rel=1e-7)


def test_a_step_with_its_sign_turned_is_another(by_trl: Any) -> None:
    loss, gradient, _ = _ours(_settings({}), PACKED)
    turned = -by_trl["mean over tokens"]["gradient"].numpy()
    assert loss != pytest.approx(-float(by_trl["mean over tokens"]["loss"]), rel=1e-3)
    assert np.abs(gradient - turned).max() > 1e-3


def test_rloo_is_dr_grpo_by_a_factor_of_the_group() -> None:
    rewards = np.random.default_rng(0).normal(size=(2, 4))
    found = [
        np.array([value[0] for value in full_group_advantages(kind, rewards, [np.zeros(1)] * 8)])
        for kind in (AdvantageEstimator.RLOO, AdvantageEstimator.DR_GRPO)
    ]
    np.testing.assert_allclose(found[0], found[1] * 4 / 3)
