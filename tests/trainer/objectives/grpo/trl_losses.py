"""Computes with TRL's own code: advantages, weights of the mismatch, losses and their gradients.

Runs in an environment of its own. Reads torch.save'd cases from the first path and writes what it found to the second.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer


def block(condition: str) -> Any:
    """The statement `if condition...` of TRL's scoring, which is a part of a long method there."""
    method = inspect.getsource(GRPOTrainer._generate_and_score_completions)  # noqa: SLF001
    tree = ast.parse(textwrap.dedent(method))
    found: list[ast.stmt] = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == condition
    ]
    return compile(ast.Module(found[-1:], []), "trl", "exec")


ADVANTAGES = block("self.multi_objective_aggregation == 'sum_then_normalize'")
MISMATCH = block("self.use_vllm and self.vllm_importance_sampling_correction")


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with what a loss reads of it, and no model."""

    def __init__(self, case: Any, said: torch.Tensor, entropy: torch.Tensor) -> None:
        same = SimpleNamespace(num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, **_: x)
        self.__dict__.update(
            accelerator=same,
            model=SimpleNamespace(training=True),
            args=SimpleNamespace(delta=case["delta"], use_bias_correction_kl=False, steps_per_generation=1),
            beta=case["beta"],
            epsilon_low=case["low"],
            epsilon_high=case["high"],
            importance_sampling_level=case["level"],
            loss_type=case["loss"],
            max_completion_length=case["most"],
            current_gradient_accumulation_steps=1,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=case["bonus"] > 0,
            entropy_coef=case["bonus"],
            use_adaptive_entropy=False,
            use_vllm=case["mode"] is not None,
            vllm_importance_sampling_correction=case["mode"] is not None,
            vllm_importance_sampling_mode=case["mode"],
            vllm_importance_sampling_clip_min=case["minimum"],
            vllm_importance_sampling_clip_max=case["maximum"],
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards=case["scale"],
            reward_weights=torch.ones(1).double(),
            _metrics={"train": defaultdict(list)},
        )
        self.said, self.entropy = said, entropy

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self.said, self.entropy, None


def computed(case: Any) -> dict[str, torch.Tensor]:
    """Of one case."""
    said = case["new"].clone().requires_grad_()
    entropy = case["entropy"].clone().requires_grad_()
    trainer = Trainer(case, said, entropy)
    names = {**vars(grpo_trainer), "math": math, "self": trainer, "device": "cpu", "tool_mask": None}
    names |= {
        "num_generations": case["members"],
        "rewards_per_func": case["rewards"].view(-1, 1),
        "unscorable_mask": torch.zeros(len(said), dtype=torch.bool),
        "completion_mask": case["mask"],
        "old_per_token_logps": case["old"],
        "sampling_per_token_logps": case["engine"],
    }
    exec(ADVANTAGES, names)  # noqa: S102 TRL's own lines
    exec(MISMATCH, names)  # noqa: S102
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), torch.ones(len(said), 1)),
        "completion_ids": case["mask"],
        "completion_mask": case["mask"],
        "advantages": names["advantages"],
        "old_per_token_logps": case["old"],
        "ref_per_token_logps": case["reference"],
        "importance_sampling_ratio": names.get("vllm_importance_sampling_ratio"),
        "num_items_in_batch": case["mask"].sum(),
    }
    loss = trainer._compute_loss(None, inputs)  # noqa: SLF001
    loss.backward()
    return {"advantages": names["advantages"], "loss": loss.detach(), "gradient": said.grad, "of_entropy": entropy.grad}


if __name__ == "__main__":
    cases = torch.load(sys.argv[1])
    torch.save({name: computed(case) for name, case in cases.items()}, sys.argv[2])
