"""Explanations of the parts of a step's time: one short formula each, with its numbers."""

from __future__ import annotations

from moejob_api.derived import balancing_method
from moejob_api.job.moe import DispatcherKind
from moejob_api.layout.expert_nodes import expert_nodes
from moejob_api.planner.cost.layers import copies_over_network
from moejob_api.planner.cost.step import TimeUse
from moejob_api.planner.memory.case import PlanningCase


def explain_time(case: PlanningCase, spent: TimeUse, share: float) -> str:
    """Return the formula behind one part, with its share of the step."""
    return f"{share:.0%}: {_formula_text(case, spent)}"


def _formula_text(case: PlanningCase, spent: TimeUse) -> str:
    layout, batch, part = case.layout, case.batch, case.share
    match spent:
        case TimeUse.BUBBLE:
            chunks = f" / {layout.virtual_pipeline} chunks" if layout.virtual_pipeline > 1 else ""
            return f"({layout.pipeline} stages - 1){chunks} beside {batch.microbatches} microbatches"
        case TimeUse.DISPATCH:
            return f"{part.sequence_tokens:,} tokens to experts on {layout.expert} GPUs and back{_over_network(case)}"
        case TimeUse.TENSOR:
            return f"{part.tokens:,} x {part.hidden:,} gathered and scattered over {layout.tensor} GPUs"
        case TimeUse.DATA:
            return f"{layout.data * layout.context} replicas, {layout.expert_data} of the experts"
        case TimeUse.OPTIMIZER:
            moved = case.spec.memory.offload_optimizer
            return f"{moved:.0%} of it on the host" if moved else "its state read and written once"
        case TimeUse.RECOMPUTE | TimeUse.COUNTING:
            recompute = f"recompute {case.spec.training.recompute.granularity}"
            return (
                recompute if spent is TimeUse.RECOMPUTE else f"one more forward pass for {balancing_method(case.spec)}"
            )
        case TimeUse.EXPERTS:
            experts = case.shape.experts
            # Rows of this GPU over its experts, of which it has count / expert.
            rows = part.count_rows(experts.per_token) * layout.expert // experts.count if experts else 0
            return f"{rows:,} rows an expert"
        case _:
            return f"{batch.microbatches} microbatches of {part.tokens:,} tokens"


def _over_network(case: PlanningCase) -> str:
    experts, dispatcher = case.shape.experts, case.spec.moe.dispatcher
    if experts is None or dispatcher is DispatcherKind.ALL_GATHER:
        return ""
    copies = copies_over_network(experts.per_token, case.layout, expert_nodes(case.layout, dispatcher))
    return f", {copies:.1f} rows of a token over the network" if copies else ""
