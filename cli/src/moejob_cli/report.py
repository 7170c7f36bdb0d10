"""A plan as a person reads it: tables and sentences. Decides nothing and prints nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moejob_api.derived import RolloutLayout
from moejob_api.hardware import CUDA_OF_IMAGES, OLDEST_DRIVER
from moejob_api.job import MoETrainingJob
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.job.resources import Accelerator
from moejob_api.layout.ranks import ParallelGroup as RankGroup
from moejob_api.layout.ranks import group_members, rank_places
from moejob_api.layout.sizes import Layout
from moejob_api.layout.stages import StageLayers, pipeline_stages
from moejob_api.models.parameters import active_parameters, total_parameters
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory import MemoryEstimate, VolumeNeed
from moejob_api.planner.plan import Plan
from moejob_api.planner.rollout_plan import rollout_of_plan
from moejob_api.problems import Problem
from moejob_api.quantities import quantity_bytes, readable_bytes
from moejob_cli.document import parallelism_fields, profile_fields_by_path
from moejob_cli.local_files import unreadable_sources
from moejob_cli.rollout_report import rollout_report

if TYPE_CHECKING:
    from moejob_api.planner.suggestions import Suggestion
    from moejob_cli.inputs import PlannedJob

BAR_WIDTH = 24
# Ranks beyond this many are summed up by stage only; --ranks lists them all.
LISTED_RANKS = 8


def plan_report(answer: PlannedJob, all_ranks: bool) -> RenderableType:
    """Return the whole report of `moejob plan`."""
    return Group(*_report_sections(answer, all_ranks))


def _profile_lines(answer: PlannedJob) -> Iterator[RenderableType]:
    if answer.profile is not None:
        yield Text(
            f"  from {answer.profile.kind} {answer.profile.name}:" + ("" if answer.profile.values else " nothing")
        )
        for path, value in profile_fields_by_path(answer.profile):
            yield Text.assemble(f"    {path}: ", (json.dumps(value, ensure_ascii=False), "cyan"))
    elif answer.job.spec.profile is not None:
        name = answer.job.spec.profile
        yield Text(f"  without profile {name}: give its file with --profile", style="yellow")


def _absence_lines(job: MoETrainingJob, unseen: str | None) -> Iterator[RenderableType]:
    if unseen is not None:
        yield Text(f"  model not checked: {unseen}", style="yellow")
    for reason in unreadable_sources(job.spec):
        yield Text(f"  not here: {reason}", style="yellow")


def _report_sections(answer: PlannedJob, all_ranks: bool) -> Iterator[RenderableType]:
    job, plan = answer.job, answer.plan
    yield _verdict_line(job, plan)
    yield from _absence_lines(job, answer.unseen)
    yield from _profile_lines(answer)
    for problem in plan.problems:
        yield problem_line(problem, "refused", "red")
    if plan.layout is not None:
        yield Text()
        yield from _layout_lines(plan, plan.layout)
        yield from _rank_tables(plan, plan.layout, all_ranks)
    if plan.memory is not None:
        yield Text()
        yield _memory_table(plan, plan.memory)
    yield from _pod_lines(plan)
    if plan.volume is not None and plan.memory is not None:
        yield _volume_line(plan.volume, plan.spec.storage.size)
    if (rollout := rollout_of_plan(plan)) is not None:
        yield Text()
        yield rollout_report(rollout)
    for warning in plan.warnings:
        yield problem_line(warning, "note", "yellow")
    if plan.suggestions:
        yield Text()
        yield _suggestion_table(plan.suggestions)


def _verdict_line(job: MoETrainingJob, plan: Plan) -> Text:
    verdict = ("accepted", "bold green") if plan.is_accepted else ("refused", "bold red")
    job_words = f"  {job.metadata.name}: {job.spec.method} of {job.spec.model.source}"
    return Text.assemble(verdict, job_words + (f" ({model_words(plan.shape)})" if plan.shape else ""))


def model_words(shape: ModelShape) -> str:
    """Family and size of a model in a few words."""
    total, active = total_parameters(shape), active_parameters(shape)
    size = f"{total / 1e9:.1f} B parameters" if total >= 1e8 else f"{total / 1e6:.1f} M parameters"
    return f"{shape.family}, {size}" + (
        f", {active / 1e9:.1f} B active" if active < total * 0.95 and active >= 1e8 else ""
    )


def problem_line(problem: Problem, kind: str, style: str) -> Text:
    """One problem or warning as a line."""
    return Text.assemble((f"  {kind} ", style), (problem.path, "bold"), f": {problem.message}")


def _layout_lines(plan: Plan, layout: Layout) -> Iterator[Text]:
    unit = "ranks" if plan.spec.resources.accelerator is Accelerator.CPU else "GPUs"
    yield Text(
        f"  {_count_words(layout.gpus, unit)} on {_count_words(layout.nodes, 'nodes')}, {layout.gpus_per_pod} in each "
        "pod",
        style="bold",
    )
    if spares := plan.spec.resources.spares:
        more = spares * layout.gpus_per_pod
        yield Text(
            f"  {'spares':9}{_count_words(spares, 'further pods')} with {_count_words(more, unit)}, together "
            f"{_count_words(layout.gpus + more, unit)} on {_count_words(layout.nodes + spares, 'nodes')}"
        )
    yield Text(f"  {'layers':9}{_factor_words(layout.tensor, layout.context, layout.data, layout.pipeline)}")
    folded = plan.spec.parallelism.expert_layout is ExpertLayout.FOLDED
    if layout.expert > 1 or folded:
        yield Text(
            f"  {'experts':9}expert tensor {layout.expert_tensor} x expert {layout.expert} x expert data "
            f"{layout.expert_data} x pipeline {layout.pipeline} = {layout.gpus}"
        )
    if plan.rollout is not None:
        yield Text(f"  {'rollout':9}{_rollout_words(plan.rollout, plan.spec.resources.accelerator)}")


def _rollout_words(rollout: RolloutLayout, accelerator: Accelerator) -> str:
    engines = _count_words(rollout.engines, "engines")
    if accelerator is Accelerator.CPU:
        return f"{engines} on {_count_words(rollout.nodes, 'further nodes')}"
    further = f"{_count_words(rollout.gpus, 'further GPUs')} on {_count_words(rollout.nodes, 'nodes')}"
    where = further if rollout.gpus else "the trainer's GPUs"
    return f"{engines} of {_count_words(rollout.tensor, 'GPUs')} on {where}"


def _count_words(count: int, things: str) -> str:
    return f"{count} {things.removesuffix('s') if count == 1 else things}"


def _factor_words(tensor: int, context: int, data: int, pipeline: int) -> str:
    total = tensor * context * data * pipeline
    return f"tensor {tensor} x context {context} x data {data} x pipeline {pipeline} = {total}"


def _rank_tables(plan: Plan, layout: Layout, all_ranks: bool) -> Iterator[RenderableType]:
    yield Text()
    stage_layers = pipeline_stages(plan.spec.parallelism, len(plan.shape.layers)) if plan.shape else None
    yield Padding(_stage_table(layout, stage_layers), (0, 0, 0, 2))
    if all_ranks or 1 < layout.gpus <= LISTED_RANKS:
        yield Text()
        yield Padding(_rank_table(layout), (0, 0, 0, 2))


def _stage_table(layout: Layout, stage_layers: tuple[StageLayers, ...] | None) -> Table:
    table = Table("stage", "ranks", "nodes", "layers", box=None, header_style="dim", pad_edge=False)
    in_stage = layout.gpus // layout.pipeline
    rows = []
    for stage in range(layout.pipeline):
        first, last = stage * in_stage, (stage + 1) * in_stage - 1
        layer_words = (
            ", ".join(_span_words(chunk.start, chunk.stop - 1) for chunk in stage_layers[stage].chunks if chunk)
            if stage_layers
            else ""
        )
        nodes = _span_words(first // layout.gpus_per_pod, last // layout.gpus_per_pod)
        rows.append((str(stage), _span_words(first, last), nodes, _stage_words(layer_words, stage, layout.pipeline)))
    for row in _shorten_rows(rows):
        table.add_row(*row)
    return table


def _stage_words(layer_words: str, stage: int, pipeline: int) -> str:
    parts = ["embedding"] if stage == 0 else []
    parts += [layer_words] if layer_words else []
    parts += ["output"] if stage == pipeline - 1 else []
    return ", ".join(parts)


def _shorten_rows(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield at most eight rows: the middle stages of a long pipeline look like those at its ends."""
    if len(rows) <= 8:
        yield from rows
        return
    yield from rows[:4]
    yield ("...",) * len(rows[0])
    yield from rows[-3:]


def _span_words(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _rank_table(layout: Layout) -> Table:
    columns = ("rank", "node", "local", *(str(group) for group in RankGroup), "tensor peers", "expert peers")
    table = Table(*columns, box=None, header_style="dim", pad_edge=False)
    for rank_place in rank_places(layout):
        coordinates = (
            rank_place.tensor,
            rank_place.context,
            rank_place.data,
            rank_place.pipeline,
            rank_place.expert_tensor,
            rank_place.expert,
            rank_place.expert_data,
        )
        peers = (
            _peer_words(group_members(layout, group, rank_place.rank)) for group in (RankGroup.TENSOR, RankGroup.EXPERT)
        )
        table.add_row(*map(str, (rank_place.rank, rank_place.node, rank_place.local_rank, *coordinates)), *peers)
    return table


def _peer_words(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return "-"
    step = ranks[1] - ranks[0]
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")


def _memory_table(plan: Plan, need: MemoryEstimate) -> RenderableType:
    unit = "rank" if plan.spec.resources.accelerator is Accelerator.CPU else "GPU"
    title = f"memory of a {unit} of stage {need.stage}, {need.peak.phase}"
    table = Table(title, "", "", "", box=None, header_style="dim", pad_edge=False)
    table.columns[1].justify = "right"
    for part in need.parts:
        bar = "▇" * max(0, round(part.bytes / max(need.bytes, 1) * BAR_WIDTH))
        table.add_row(part.name, readable_bytes(part.bytes), Text(bar, style="cyan"), Text(part.why, style="dim"))
    table.add_row(
        Text("together", style="bold"), Text(readable_bytes(need.bytes), style="bold"), "", _limit_words(plan, need)
    )
    if need.host_bytes_per_pod:
        replay = need.replay_bytes_per_pod
        replay_words = Text(f"{readable_bytes(replay)} of it for grpo.routingReplay" if replay else "", style="dim")
        table.add_row("host memory of a pod", readable_bytes(need.host_bytes_per_pod), "", replay_words)
    return Padding(table, (0, 0, 0, 2))


def _pod_lines(plan: Plan) -> Iterator[Text]:
    """The requests and limits of pods, and the driver that their nodes need."""
    for name, pod in (("pod", plan.trainer_pod), ("engine pod", plan.engine_pod)):
        if pod is not None:
            yield Text(
                f"  each {name} requests {_quantity_words(pod.requests)}; limits {_quantity_words(pod.limits)}; "
                f"/dev/shm {pod.shared_memory}"
            )
    if plan.layout is not None and plan.spec.resources.accelerator is Accelerator.GPU:
        yield Text(f"  nodes need the NVIDIA driver {OLDEST_DRIVER} or later, for CUDA {CUDA_OF_IMAGES} of the images")


def _quantity_words(quantities: Mapping[str, int | str]) -> str:
    return ", ".join(f"{name} {quantity}" for name, quantity in quantities.items()) or "none"


def _volume_line(need: VolumeNeed, size: int | str | None) -> Text:
    parts = [f"{need.checkpoints} checkpoints of {readable_bytes(need.checkpoint)}"]
    parts += [
        f"{name} {readable_bytes(size)}"
        for name, size in (("export", need.export), ("download", need.download), ("recorded tokens", need.tokens))
        if size
    ]
    size_words = f" of {readable_bytes(quantity_bytes(size))}" if size is not None else ""
    return Text(f"  volume: {', '.join(parts)}; together {readable_bytes(need.bytes)}{size_words}")


def _limit_words(plan: Plan, need: MemoryEstimate) -> Text:
    if plan.limit_bytes is None:
        return Text("")
    fits = need.bytes <= plan.limit_bytes
    share = need.bytes / plan.limit_bytes
    return Text(f"{share:.0%} of {readable_bytes(plan.limit_bytes)}", style="green" if fits else "red")


def _suggestion_table(suggestions: Sequence[Suggestion]) -> RenderableType:
    table = Table(
        "layouts that would be accepted", "GPUs", "nodes", "a GPU needs", box=None, header_style="dim", pad_edge=False
    )
    for suggestion in suggestions:
        need = suggestion.fit.per_gpu_bytes
        table.add_row(
            parallelism_words(suggestion.parallelism),
            str(suggestion.fit.gpus),
            str(suggestion.fit.nodes),
            readable_bytes(need) if need is not None else "",
        )
    return Padding(table, (0, 0, 0, 2))


def parallelism_words(parallelism: Parallelism) -> str:
    """A parallelism as it would be written in the job, on one line."""
    fields = parallelism_fields(parallelism)
    return "{" + ", ".join(f"{name}: {_yaml_word(value)}" for name, value in fields.items()) + "}"


def _yaml_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
