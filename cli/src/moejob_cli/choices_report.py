"""The layouts that `moejob plan --auto` found, as a person reads them. Decides nothing and prints nothing."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from moejob_api.job.grpo import RolloutPlacement, RolloutSettings
from moejob_api.planner.search import LayoutChoice
from moejob_api.quantities import readable_bytes
from moejob_cli.choosing import ChosenLayouts
from moejob_cli.report import model_words, parallelism_words, problem_line


def choices_report(layouts: ChosenLayouts) -> RenderableType:
    """Return the whole report of `moejob plan --auto`."""
    name = f"{layouts.job.spec.method} of {layouts.job.spec.model.source} ({model_words(layouts.shape)})"
    head = Text(f"{name} on {layouts.gpus} {layouts.hardware.name}")
    if not layouts.choices:
        why = [problem_line(problem, "refused", "red") for problem in layouts.problems]
        return Group(head, Text("  no layout on these GPUs keeps every rule and fits", style="bold red"), *why)
    return Group(head, *(_choice_lines(place, choice) for place, choice in enumerate(layouts.choices, start=1)))


def _choice_lines(place: int, choice: LayoutChoice) -> RenderableType:
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
            f"MFU {cost.mfu:.0%}, {readable_bytes(choice.memory.bytes)} on {choice.layout.nodes} nodes"
        ),
    ]
    return Group(Text(), *lines, *(Text(f"     {reason}", style="dim") for reason in choice.reasons))


def _engine_words(rollout: RolloutSettings) -> str:
    engine_size = f"of {rollout.tensor} GPU{'s' if rollout.tensor > 1 else ''}"
    age = f", staleness: {rollout.staleness}" if rollout.staleness else ""
    if rollout.placement is RolloutPlacement.COLOCATED:
        return f"engines {engine_size} beside the trainer{age}"
    return f"{rollout.replicas or 1} separate engines {engine_size}{age}"
