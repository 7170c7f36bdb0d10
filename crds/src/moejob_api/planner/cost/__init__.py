"""The time of a step on a layout, worked out from shapes and published speeds. Formulas only, no torch.

Good for ranking layouts, and within a factor of 1.5 of what was measured; docs/cost.md has the table.
"""

from moejob_api.planner.cost.estimate import CostPart, StepCost, model_flops, step_cost, step_seconds
from moejob_api.planner.cost.step import TimeUse

__all__ = ["CostPart", "StepCost", "TimeUse", "model_flops", "step_cost", "step_seconds"]
