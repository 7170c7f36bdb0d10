"""A layer's experts: routing of tokens, their dispatch and combination, and load balancing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moejob_api.job.moe import BalancingMethod, DispatcherKind, MoE
from moejob_api.job.training import RecomputeModule
from moejob_api.models.shape import Experts as ExpertShape
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.layers.activation import clamped_swiglu, swiglu
from moejob_trainer.layers.destinations import local_choices
from moejob_trainer.layers.experts import add_biases, grouped_linear, repeat_biases
from moejob_trainer.layers.float8 import Float8Weight
from moejob_trainer.layers.gradient_sums import find_gradient_sum
from moejob_trainer.layers.permutation import (
    Permutation,
    combine_rows,
    permute_into,
    permute_probabilities,
    permute_tokens,
)
from moejob_trainer.layers.routing import Routing, drop_beyond_capacity, expert_capacity, route_tokens, router_logits
from moejob_trainer.model.adapters import Adapter
from moejob_trainer.model.balancing import ExpertBalance
from moejob_trainer.model.dispatch import (
    ExpertHolders,
    all_gather_tokens,
    combine_outputs,
    dispatch_tokens,
    reduce_scatter_tokens,
)
from moejob_trainer.model.linear import Linear, TensorShare, mark_expert, mark_partial
from moejob_trainer.model.mlp import GatedMLP
from moejob_trainer.model.packed_batch import PackedBatch
from moejob_trainer.model.recompute import maybe_discard

Fetch = Callable[[Tensor, Permutation], Tensor]


@dataclass(frozen=True, slots=True)
class MoESettings:
    """Settings of experts, beside the model's own shape."""

    moe: MoE
    balancing: BalancingMethod
    routing: Routing
    gate_limit: float | None
    recompute: frozenset[RecomputeModule]


class Router(nn.Module):
    """One logit for each expert. Computed in float32 or float64, whatever the weights are kept in."""

    def __init__(self, shape: ExpertShape, hidden: int, share: TensorShare, settings: MoESettings) -> None:
        super().__init__()
        self.dtype = settings.routing.dtype
        self.weight = nn.Parameter(torch.empty(shape.count, hidden))
        self.bias = nn.Parameter(torch.empty(shape.count)) if shape.router_bias else None
        self.selection_bias: Tensor | None
        bias = torch.zeros(shape.count, dtype=torch.float32) if shape.selection_bias else None
        self.register_buffer("selection_bias", bias)
        for parameter in self.parameters():
            mark_partial(parameter, is_partial=share.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """[t, h] -> [t, E]"""
        return router_logits(x, self.weight, self.bias, self.dtype)


class LocalExperts(nn.Module):
    """The experts of this rank: rows sorted by expert go through all of them at once."""

    def __init__(self, shape: ExpertShape, hidden: int, groups: Groups, settings: MoESettings) -> None:
        super().__init__()
        self.gate_limit = settings.gate_limit
        self.forgets_input = RecomputeModule.EXPERT_INPUT in settings.recompute
        self.forgets_activation = RecomputeModule.EXPERT_ACTIVATION in settings.recompute
        self.hidden = hidden
        self.count = _divide_exactly(shape.count, groups.expert.size, "experts", "expert")
        # Replicas that divide the weights flatten their axes.
        self.features = _divide_exactly(
            shape.intermediate, groups.expert_tensor.size, "features of an expert", "expert tensor"
        )
        features = self.features
        self.gate_up = nn.Parameter(torch.empty(self.count, 2, features, hidden))
        self.down = nn.Parameter(torch.empty(self.count, hidden, features))
        self.gate_up_bias = nn.Parameter(torch.empty(self.count, 2, features)) if shape.bias else None
        self.down_bias = nn.Parameter(torch.empty(self.count, hidden)) if shape.bias else None
        # Partial sums meet behind the experts: only one rank may add the bias, so only one sees its gradient.
        self.adds_bias = groups.expert_tensor.rank == 0
        if self.down_bias is not None:
            mark_partial(self.down_bias)
        for parameter in self.parameters():
            mark_expert(parameter)
        self.gate_up_adapter: Adapter | None = None
        self.down_adapter: Adapter | None = None
        self.gate_up_float8: Float8Weight | None = None
        self.down_float8: Float8Weight | None = None

    def forward(
        self, x: Tensor, probabilities: Tensor, permutation: Permutation, fetch: Fetch = permute_tokens
    ) -> Tensor:
        """Tokens x [t, h], probabilities [r] of their rows -> rows [r, h] sorted by expert, weighted

        fetch: the way from tokens to sorted rows. If inputs are forgotten, `permute_tokens`: tokens are here then.
        """
        bounds, rows = permutation.bounds, permutation.row_count

        def fetch_rows(x: Tensor) -> Tensor:
            return fetch(x, permutation)

        permute_again = partial(permute_into, permutation=permutation)
        gate_up = maybe_discard(
            self.forgets_input, fetch_rows, partial(self._project_gate_up, bounds=bounds), x, remake=permute_again
        )
        down = partial(self._project_down, bounds=bounds)
        y = maybe_discard(self.forgets_activation, self._apply_activation, down, gate_up, probabilities)
        if self.down_bias is None:
            return y
        biases = repeat_biases(self.down_bias, bounds, rows) * probabilities.unsqueeze(-1)
        return y + (biases * float(self.adds_bias)).to(y.dtype)

    def _project_gate_up(self, rows: Tensor, bounds: Tensor) -> Tensor:
        weight, total = self.gate_up.view(self.count, 2 * self.features, -1), find_gradient_sum(self.gate_up)
        gate_up = grouped_linear(rows, weight, bounds, total=total, float8=self.gate_up_float8)
        if self.gate_up_bias is not None:
            gate_up = add_biases(gate_up, self.gate_up_bias.view(self.count, -1), bounds)
        gate_up = gate_up.unflatten(1, (2, -1))
        if self.gate_up_adapter is not None:
            gate_up = gate_up + self.gate_up_adapter.apply_to_experts(rows, bounds)
        return gate_up

    def _project_down(self, inner: Tensor, bounds: Tensor) -> Tensor:
        weight = self.down.view(self.count, -1, self.features)
        y = grouped_linear(inner, weight, bounds, total=find_gradient_sum(self.down), float8=self.down_float8)
        return y if self.down_adapter is None else y + self.down_adapter.apply_to_experts(inner, bounds)

    def _apply_activation(self, gate_up: Tensor, probabilities: Tensor) -> Tensor:
        if self.gate_limit is not None:
            return clamped_swiglu(gate_up, probabilities, limit=self.gate_limit)
        return swiglu(gate_up, probabilities)


class MoELayer(nn.Module):
    """Router, experts and what all tokens share."""

    def __init__(
        self, shape: ExpertShape, hidden: int, groups: Groups, share: TensorShare, settings: MoESettings
    ) -> None:
        super().__init__()
        self.shape, self.groups, self.settings = shape, groups, settings
        # In the model; None where nothing is replayed, as in modules for further tokens.
        self.number: int | None = None
        self.router = Router(shape, hidden, share, settings)
        self.experts = LocalExperts(shape, hidden, groups, settings)
        self.balance = ExpertBalance(settings.routing, settings.moe, settings.balancing, groups)
        self.shared: GatedMLP | None = None
        self.shared_gate: Linear | None = None
        if shape.shared_intermediate:
            is_recomputed = RecomputeModule.SHARED_EXPERTS in settings.recompute
            self.shared = GatedMLP(hidden, shape.shared_intermediate, share, is_recomputed=is_recomputed)
        if shape.shared_gate:
            self.shared_gate = Linear((1,), (hidden,))
            mark_partial(self.shared_gate.weight, is_partial=share.sequence_parallel)

    def forward(self, x: Tensor, packed: PackedBatch) -> Tensor:
        """Send each token to its experts, and add up what they return. [t, h] -> [t, h]"""
        logits = self.router(x)
        chosen, probabilities = self._route_tokens(logits, packed)
        probabilities = self.balance.attach_losses(probabilities, logits, chosen, packed)
        chosen, probabilities = self._drop_beyond_capacity(chosen, probabilities, packed)
        y = self._compute_experts(x, chosen, probabilities)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)

    def _route_tokens(self, logits: Tensor, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, its own or those to be replayed, and this router's weights of them."""
        route = partial(route_tokens, routing=self.settings.routing, selection_bias=self.router.selection_bias)
        replayed = None if self.number is None else packed.replayed.get(self.number)
        if replayed is None:
            return route(logits)
        router_choices, _ = route(logits.detach())
        replayed = replayed.to(logits.device, non_blocking=True)
        is_known = replayed > 0
        chosen = torch.where(is_known, replayed.long() - 1, router_choices)
        self.balance.count_replayed(router_choices, chosen, is_known)
        return route(logits, chosen=chosen)

    def _drop_beyond_capacity(
        self, chosen: Tensor, probabilities: Tensor, packed: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        factor = self.settings.moe.capacity_factor
        if factor is None:
            return chosen, probabilities
        # Padding takes no capacity: else a layout's padding would decide which choices are dropped.
        chosen = chosen.masked_fill(~packed.is_real.unsqueeze(-1), self.shape.count)
        max_tokens = expert_capacity(packed.is_real.sum(), self.settings.routing, factor)
        chosen, probabilities = drop_beyond_capacity(chosen, probabilities, max_tokens, self.shape.count)
        self.balance.count_dropped(chosen, packed)
        return chosen, probabilities

    def _compute_experts(self, x: Tensor, chosen: Tensor, probabilities: Tensor) -> Tensor:
        groups, experts = self.groups, self.experts.count
        if groups.expert.size == groups.expert_tensor.size == 1:
            is_complete = self.settings.moe.capacity_factor is None
            return self._apply_local_experts(
                x, chosen, probabilities, None if is_complete else _count_choices(chosen, experts)
            )
        if self.settings.moe.dispatcher is DispatcherKind.ALL_GATHER:
            return self._compute_with_all_gather(x, chosen, probabilities)
        dispatched = dispatch_tokens(
            x, chosen, probabilities, ExpertHolders(groups, experts, self.experts.forgets_input)
        )
        order = Permutation.from_choices(dispatched.chosen, experts, dispatched.choice_count)
        weights = permute_probabilities(dispatched.probabilities, order)
        return combine_outputs(self.experts(dispatched.rows, weights, order, dispatched.fetch_rows), dispatched, order)

    def _compute_with_all_gather(self, x: Tensor, chosen: Tensor, probabilities: Tensor) -> Tensor:
        """Every rank sees the tokens of all and adds what its own experts make of them."""
        experts, groups = self.experts.count, self.groups
        local_numbers = local_choices(all_gather_tokens(chosen, groups), groups.expert.rank, experts)
        y = self._apply_local_experts(
            all_gather_tokens(x, groups),
            local_numbers,
            all_gather_tokens(probabilities, groups),
            _count_choices(local_numbers, experts),
        )
        return reduce_scatter_tokens(y, groups)

    def _apply_local_experts(self, x: Tensor, chosen: Tensor, probabilities: Tensor, choices: int | None) -> Tensor:
        """Apply this rank's experts to tokens x [t, h], of whose choices `count` are theirs. [t, h]"""
        permutation = Permutation.from_choices(chosen, self.experts.count, choices)
        weights = permute_probabilities(probabilities, permutation)
        return combine_rows(self.experts(x, weights, permutation), permutation)


def _count_choices(chosen: Tensor, experts: int) -> int:
    """Return the number of choices that are not of none, where some are: the host has to know."""
    return int((chosen < experts).sum())


def _divide_exactly(size: int, ranks: int, what: str, group: str) -> int:
    if size % ranks:
        raise ValueError(f"{size} {what} cannot be divided over {ranks} {group} ranks")
    return size // ranks
