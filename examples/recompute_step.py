"""Compute a recorded step of a GRPO run again with Transformers and torch alone, and print how far apart the two are.

    python examples/recompute_step.py runs/JOB --model FOLDER [--after FOLDER] [--step 1] [--json]

The job needs grpo.recordTokens: true. FOLDER of --model has the weights that the step began with: for step 1 the model
that the job names, for step N what `moejob export --step N-1` writes. --after takes the export of the step itself and
compares weights; AdamW begins with empty moments here, so that comparison is of step 1. --reference is the model that
kl compares with, by default the one of --model. Nothing of moejob is imported: docs/grpo.md has arrays and formulas.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

EPSILON = 1e-4


@dataclass(frozen=True)
class Answer:
    """An answer that the step trained on, which is a rollout of one row. Tensors are of its tokens. [N]"""

    group: int
    prompt: Tensor
    tokens: Tensor
    engine: Tensor
    reward: float
    is_truncated: bool
    # What the trainer computed; absent where it needed none.
    advantages: Tensor
    old: Tensor | None
    reference: Tensor | None


@dataclass(frozen=True)
class Update:
    """An update as the trainer made it."""

    answers: list[int]
    loss: float
    norm: float
    rate: float
    is_applied: bool


@dataclass(frozen=True)
class Step:
    """A recorded step: its settings by section, answers and updates."""

    settings: dict[str, Any]
    answers: list[Answer]
    updates: list[Update]
    left_out: list[str]

    @property
    def grpo(self) -> dict[str, Any]:
        """Return the section grpo, as the job has it."""
        section: dict[str, Any] = self.settings["grpo"]
        return section


@dataclass(frozen=True)
class Outputs:
    """The model's log-probabilities and entropies of an answer's tokens, at the job's temperature. [N]"""

    log_probabilities: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Recomputed:
    """The numbers of a step that are the same for all of its updates. Tensors are of answers' tokens."""

    advantages: list[Tensor]
    # None where each update compares the model with itself.
    old: list[Tensor] | None
    reference: list[Tensor] | None


# --- the record -------------------------------------------------------------------------------------------------------


def read_step(run: Path, number: int) -> Step:
    """Read tokens/step-N.safetensors."""
    with safe_open(run / "tokens" / f"step-{number}.safetensors", "pt") as file:
        facts = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
    settings = {name: json.loads(facts[name]) for name in ("model", "grpo", "training", "moe", "derived")}
    refuse_what_is_missing(settings)
    outcomes = [json.loads(facts["outcomes"])[code] for code in arrays["group.outcome"].tolist()]
    left_out = [outcome for outcome in outcomes if outcome != "Learned"]
    return Step(settings, list(read_answers(arrays, outcomes)), list(read_updates(arrays)), left_out)


def refuse_what_is_missing(settings: dict[str, Any]) -> None:
    """Refuse a job whose loss or model has a part that this script does not compute."""
    lacks = {
        "grpo.routingReplay": settings["grpo"].get("routingReplay", False),
        "training.lora": settings["training"].get("lora") is not None,
        "moe.balancing": settings["derived"]["balancing"] != "None",
    }
    for name, is_used in lacks.items():
        if is_used:
            raise SystemExit(f"the job uses {name}, which this script does not compute")


def read_answers(arrays: dict[str, Tensor], outcomes: Sequence[str]) -> Iterator[Answer]:
    """Yield the answers of trained groups, which come first in the record."""
    prompts = arrays["prompt.tokens"].split(arrays["group.promptLength"].tolist())
    lengths = arrays["answer.length"].tolist()
    groups = arrays["answer.group"].tolist()
    learned = [number for number, group in enumerate(groups) if outcomes[group] == "Learned"]
    tokens, engine = arrays["token.id"].split(lengths), arrays["token.engine"].split(lengths)
    parts = {
        name: arrays[f"token.{name}"].split([lengths[number] for number in learned])
        for name in ("advantage", "old", "reference")
        if f"token.{name}" in arrays
    }
    for number in learned:
        yield Answer(
            groups[number],
            prompts[groups[number]],
            tokens[number],
            engine[number],
            arrays["answer.reward"][number].item(),
            bool(arrays["answer.truncated"][number]),
            parts["advantage"][number],
            parts["old"][number] if "old" in parts else None,
            parts["reference"][number] if "reference" in parts else None,
        )


def read_updates(arrays: dict[str, Tensor]) -> Iterator[Update]:
    """Yield the updates in the order in which they were made."""
    members = arrays["update.answers"].split(arrays["update.size"].tolist())
    for number, answers in enumerate(members):
        yield Update(
            answers.tolist(),
            arrays["update.loss"][number].item(),
            arrays["update.gradientNorm"][number].item(),
            arrays["update.learningRate"][number].item(),
            bool(arrays["update.applied"][number]),
        )


# --- advantages -------------------------------------------------------------------------------------------------------


def compute_advantages(step: Step, old: Sequence[Tensor], reference: Sequence[Tensor] | None) -> list[Tensor]:
    """Return the advantage of each token of each answer."""
    grpo = step.grpo
    penalties = [torch.zeros(len(answer.tokens), dtype=torch.float64) for answer in step.answers]
    if grpo["kl"]["applyTo"] == "Reward" and reference is not None:
        coefficient = grpo["kl"]["coefficient"]
        penalties = [-coefficient * estimate_kl(grpo, *pair).double() for pair in zip(old, reference, strict=True)]
    rewards = torch.tensor([answer.reward for answer in step.answers], dtype=torch.float64)
    if grpo["advantage"] == "ReinforcePlusPlus":
        return whiten_values([reward + sum_to_go(part) for reward, part in zip(rewards, penalties, strict=True)])
    rewards = rewards + torch.stack([part.sum() for part in penalties])
    groups, values = torch.tensor([answer.group for answer in step.answers]), torch.zeros_like(rewards)
    for group in groups.unique():
        is_member = groups == group
        values[is_member] = compare_with_group(grpo["advantage"], rewards[is_member])
    return [value.repeat(len(part)) for value, part in zip(values, penalties, strict=True)]


def compare_with_group(kind: str, rewards: Tensor) -> Tensor:
    """Return each reward of a group, which may have any size, compared with the others. [members]"""
    centred, members = rewards - rewards.mean(), len(rewards)
    if members == 1:
        return centred
    if kind == "GRPO":
        return centred / (rewards.std() + EPSILON)
    return centred * members / (members - 1) if kind == "RLOO" else centred


def sum_to_go(values: Tensor) -> Tensor:
    """Return for each token the sum of its value and of all values behind it."""
    return values.flip(0).cumsum(0).flip(0)


def whiten_values(values: Sequence[Tensor]) -> list[Tensor]:
    """Return values of mean 0 and deviation 1 over all tokens."""
    together = torch.cat(list(values))
    deviation = together.std(correction=0) + EPSILON
    return [(value - together.mean()) / deviation for value in values]


def estimate_kl(grpo: dict[str, Any], log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """Return the estimate of each token."""
    ratio = log_probabilities - reference
    match grpo["kl"]["kind"]:
        case "K1":
            return ratio
        case "Abs":
            return ratio.abs()
        case "K2":
            return ratio.square() / 2
        case _:
            return (-ratio).expm1() + ratio


# --- the loss ---------------------------------------------------------------------------------------------------------


def weigh_answers(step: Step, members: Sequence[int]) -> tuple[list[float], float]:
    """Return the weight of a token of each answer of an update, and the factor of the whole loss."""
    grpo = step.grpo
    is_filtered = grpo["overlong"]["filter"]
    answers = [step.answers[number] for number in members]
    counted = [0 if is_filtered and answer.is_truncated else len(answer.tokens) for answer in answers]
    match grpo["lossAggregation"]:
        case "Sequence":
            weights = [1 / max(count, 1) for count in counted]
        case "Group":
            weights = [1 / max(1, tokens_of_group(answer.group, answers, counted)) for answer in answers]
        case _:
            weights = [1.0] * len(answers)
    scale = sum(counted) / (len(answers) * grpo["maxNewTokens"]) if grpo["lossAggregation"] == "Constant" else 1.0
    return [weight if count else 0.0 for weight, count in zip(weights, counted, strict=True)], scale


def tokens_of_group(group: int, answers: Sequence[Answer], counted: Sequence[int]) -> int:
    """Return the tokens that count in one group of an update."""
    return sum(count for answer, count in zip(answers, counted, strict=True) if answer.group == group)


def compute_losses(step: Step, number: int, outputs: Outputs, numbers: Recomputed) -> Tensor:
    """Return the loss of each token of an answer, before its weight."""
    grpo, new, answer = step.grpo, outputs.log_probabilities, step.answers[number]
    old = new.detach() if numbers.old is None else numbers.old[number]
    ratios = new - old
    if grpo["importance"] == "Sequence":
        ratios = ratios.mean().expand(len(ratios))
    losses = compute_policy_losses(grpo, ratios, new, numbers.advantages[number])
    if grpo.get("mismatch") is not None:
        losses = losses * weigh_mismatch(grpo["mismatch"], old - answer.engine)
    if numbers.reference is not None and grpo["kl"]["applyTo"] == "Loss":
        losses = losses + grpo["kl"]["coefficient"] * estimate_kl(grpo, new, numbers.reference[number])
    if grpo["entropyCoefficient"] > 0:
        losses = losses - grpo["entropyCoefficient"] * outputs.entropy
    return losses


def compute_policy_losses(grpo: dict[str, Any], ratios: Tensor, new: Tensor, advantages: Tensor) -> Tensor:
    """Return the clipped surrogate of PPO, or CISPO's."""
    weights = ratios.exp()
    within = weights.clamp(1 - grpo["clipLow"], 1 + grpo["clipHigh"])
    if grpo["policyLoss"] == "CISPO":
        return -within.detach() * advantages * new
    surrogate = torch.minimum(weights * advantages, within * advantages)
    if grpo.get("dualClip") is not None:
        bounded = torch.maximum(surrogate, grpo["dualClip"] * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    return -surrogate


def weigh_mismatch(settings: dict[str, Any], ratios: Tensor) -> Tensor:
    """Return the importance weights between trainer and engine."""
    weights = (ratios.sum().expand(len(ratios)) if settings["level"] == "Sequence" else ratios).exp()
    if settings["mode"] == "Truncate":
        return weights.clamp(max=settings["maximum"])
    is_within = (weights >= settings["minimum"]) & (weights <= settings["maximum"])
    return torch.where(is_within, weights, 0.0)


# --- the model --------------------------------------------------------------------------------------------------------


def load_model(folder: Path, step: Step) -> Any:
    """Read a model in float32, with its router frozen where the job's was."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0].rpartition(".")[2]
        if step.settings["derived"]["routerIsFrozen"] and owner in ("gate", "router"):
            parameter.requires_grad_(requires_grad=False)
    return model


def compute_outputs(model: Any, answer: Answer, temperature: float) -> Outputs:
    """Compute a model's log-probabilities and entropies of an answer's tokens."""
    tokens = torch.cat([answer.prompt, answer.tokens]).long()
    logits = model(tokens[None]).logits[0, len(answer.prompt) - 1 : -1].float() / temperature
    log_probabilities = torch.log_softmax(logits, -1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return Outputs(log_probabilities.gather(1, answer.tokens.long()[:, None])[:, 0], entropy)


@torch.no_grad()
def compute_all(model: Any, step: Step) -> list[Tensor]:
    """Compute the log-probabilities of all answers, as the model is now."""
    temperature = step.grpo["temperature"]
    return [compute_outputs(model, answer, temperature).log_probabilities for answer in step.answers]


def make_optimizer(model: Any, step: Step) -> torch.optim.AdamW:
    """Make an AdamW that decays no norm and no bias."""
    settings = step.settings["training"]["optimizer"]
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for name, parameter in trained if is_decayed(name) is decayed],
            "weight_decay": settings["weightDecay"] if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    return torch.optim.AdamW(groups, betas=(settings["beta1"], settings["beta2"]), eps=settings["epsilon"])


def is_decayed(name: str) -> bool:
    """Return whether weight decay applies to a parameter."""
    owner, _, last = name.rpartition(".")
    return not (last == "bias" or last.endswith("_bias") or last == "sinks" or owner.endswith("norm"))


# --- the step ---------------------------------------------------------------------------------------------------------


def recompute(step: Step, model: Any, reference_folder: Path | None) -> dict[str, float]:
    """Make the updates of the step on a model, and return the largest distance of each number."""
    before = compute_all(model, step)
    needs_reference = step.grpo["kl"]["coefficient"] > 0
    reference = None
    if needs_reference:
        reference = before if reference_folder is None else compute_all(load_model(reference_folder, step), step)
    advantages = compute_advantages(step, before, reference)
    keeps_old = step.answers[0].old is not None
    numbers = Recomputed([values.float() for values in advantages], before if keeps_old else None, reference)
    distances = compare_outputs(step, before, numbers)
    optimizer = make_optimizer(model, step)
    for update in step.updates:
        loss, norm = compute_gradient(step, model, update, numbers)
        distances["loss"] = max(distances.get("loss", 0.0), abs(loss - update.loss))
        distances["gradient norm, relative"] = max(
            distances.get("gradient norm, relative", 0.0), abs(norm - update.norm) / max(update.norm, 1e-30)
        )
        if update.is_applied:
            apply_update(step, optimizer, norm, update.rate)
    return distances


def compute_gradient(step: Step, model: Any, update: Update, numbers: Recomputed) -> tuple[float, float]:
    """Leave the gradient of an update in the model; return the loss and the norm."""
    model.zero_grad(set_to_none=True)
    weights, scale = weigh_answers(step, update.answers)
    lengths = [len(step.answers[number].tokens) for number in update.answers]
    weight_of_all = math.fsum(weight * length for weight, length in zip(weights, lengths, strict=True))
    loss = 0.0
    for number, weight in zip(update.answers, weights, strict=True):
        if weight:
            outputs = compute_outputs(model, step.answers[number], step.grpo["temperature"])
            part = weight * scale / weight_of_all * compute_losses(step, number, outputs, numbers).sum()
            part.backward()
            loss += part.item()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return loss, float(torch.stack(squares).sum().sqrt())


def apply_update(step: Step, optimizer: torch.optim.AdamW, norm: float, rate: float) -> None:
    """Clip the gradient and let the optimizer take a step."""
    most = step.settings["training"]["clipGrad"]
    scale = min(1.0, most / (norm + 1e-6)) if most else 1.0
    for group in optimizer.param_groups:
        group["lr"] = rate
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    optimizer.step()


# --- distances --------------------------------------------------------------------------------------------------------


def compare_outputs(step: Step, before: Sequence[Tensor], numbers: Recomputed) -> dict[str, float]:
    """Return the largest distances of log-probabilities, ratios and advantages."""
    answers = step.answers
    to_engine = largest_distance([answer.engine for answer in answers], before)
    distances = {
        "log-probabilities, engine": to_engine,
        "ratios to the engine": largest_distance(
            [torch.ones_like(values) for values in before],
            [(values - answer.engine).exp() for values, answer in zip(before, answers, strict=True)],
        ),
        "advantages": largest_distance([answer.advantages for answer in answers], numbers.advantages),
    }
    old = [answer.old for answer in answers if answer.old is not None]
    if old:
        distances["log-probabilities, trainer"] = largest_distance(old, before)
    reference = [answer.reference for answer in answers if answer.reference is not None]
    if reference and numbers.reference is not None:
        distances["log-probabilities, reference model"] = largest_distance(reference, numbers.reference)
    return distances


def largest_distance(recorded: Sequence[Tensor], computed: Sequence[Tensor]) -> float:
    """Return the largest |difference| of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(recorded, computed, strict=True))


@torch.no_grad()
def compare_weights(model: Any, before: Path, after: Path) -> float:
    """Return how far apart the step's changes of the weights are, as a part of their size: 0 equal, 1 nothing alike."""
    began, ended = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict() for folder in (before, after)
    )
    apart = changed = 0.0
    for name, weight in model.state_dict().items():
        apart += float((weight - ended[name]).double().square().sum())
        changed += float((ended[name] - began[name]).double().square().sum())
    return math.sqrt(apart / changed) if changed else math.inf


def main() -> None:
    """Print every distance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--model", type=Path, help="weights before the step; absent: the folder that the job names")
    parser.add_argument("--reference", type=Path, help="the model that kl compares with; absent: that of --model")
    parser.add_argument("--after", type=Path, help="export of the step's weights")
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the distances as JSON")
    arguments = parser.parse_args()
    step = read_step(arguments.run, arguments.step)
    before = arguments.model or Path(step.settings["model"]["source"])
    model = load_model(before, step)
    distances = recompute(step, model, arguments.reference)
    if arguments.after is not None:
        distances["updates of the weights, relative"] = compare_weights(model, before, arguments.after)
    if arguments.json:
        print(json.dumps(distances))
        return
    print(
        f"step {arguments.step}: {len(step.answers)} answers in {len(step.updates)} updates; left out: {step.left_out}"
    )
    for name, distance in distances.items():
        print(f"{name:40} {distance:.2e}")


if __name__ == "__main__":
    main()
