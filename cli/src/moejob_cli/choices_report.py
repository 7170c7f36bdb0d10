"""The layouts that `moejob plan --auto` found, as a person reads them. Decides nothing and prints nothing."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from moejob_api.job.grpo import Placement, Rollout
from moejob_api.planner.search import Choice
from moejob_api.quantities import readable
from moejob_cli.choosing import Chosen
from moejob_cli.report import model_words, parallelism_words, problem_line


def choices_report(found: Chosen) -> RenderableType:
    """Return the whole report of `moejob plan --auto`."""
    name = f"{found.job.spec.method} of {found.job.spec.model.source} ({model_words(found.shape)})"
    head = Text(f"{name} on {found.gpus} {found.hardware.name}")
    if not found.choices:
        why = [problem_line(problem, "refused", "red") for problem in found.problems]
        return Group(head, Text("  no layout on these GPUs keeps every rule and fits", style="bold red"), *why)
    return Group(head, *(_choice(place, choice) for place, choice in enumerate(found.choices, start=1)))


def _choice(place: int, choice: Choice) -> RenderableType:
    training, cost = choice.spec.training, choice.cost
    settings = [f"microBatchSize: {training.micro_batch_size}", f"recompute: {training.recompute.granularity}"]
    if choice.spec.memory.offload_optimizer:
        settings.append(f"offloadOptimizer: {choice.spec.memory.offload_optimizer:g}")
    if choice.spec.grpo is not None:
        settings.append(_engine_words(choice.spec.grpo.rollout))
    lines = [
        Text.assemble((f"  {place}. {parallelism_words(choice.spec.parallelism)}", "bold"), f"  {', '.join(settings)}"),
        Text(
            f"     {cost.seconds:.2f} s a step, {cost.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
            f"MFU {cost.mfu:.0%}, {readable(choice.memory.bytes)} on {choice.layout.nodes} nodes"
        ),
    ]
    return Group(Text(), *lines, *(Text(f"     {reason}", style="dim") for reason in choice.reasons))


def _engine_words(rollout: Rollout) -> str:
    of = f"of {rollout.tensor} GPU{'s' if rollout.tensor > 1 else ''}"
    if rollout.placement is Placement.COLOCATED:
        return f"engines {of} beside the trainer"
    return f"{rollout.replicas or 1} separate engines {of}"
