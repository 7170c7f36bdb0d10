"""Metrics of an update beside its loss: the spread of tokens over experts, and the peak memory.

Every number is the same on every rank and in every layout. One sum over all ranks collects them, once an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moejob_api.job.moe import MoE
from moejob_api.models.shape import Experts
from moejob_api.router_health import COLLAPSED_CHOICES
from moejob_trainer.distributed.collectives import sum_over_group
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.layers.routing import Routing, expert_load
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.balancing import ExpertBalance
from moejob_trainer.model.moe_layer import MoELayer
from moejob_trainer.model.stage import ModelStage
from moejob_trainer.runtime.devices import peak_memory_bytes
from moejob_trainer.training import ExpertCounts

# Columns of a layer's counters, behind the tokens of each of its E experts.
_LOSS, _DROPPED, _ENTROPY, _REPLAYED, _DIFFERING = -5, -4, -3, -2, -1
_SUMS = 5


@dataclass(frozen=True, slots=True)
class CollectedMetrics:
    """The metrics of an update, and the counts behind those of experts."""

    numbers: dict[str, float]
    expert_counts: ExpertCounts | None = None


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """Reads the counters of this rank's layers."""

    model: Architecture
    moe: MoE
    stages: Sequence[ModelStage]
    groups: Groups
    device: torch.device

    def collect_metrics(self) -> CollectedMetrics:
        """Return the metrics of the last update."""
        counters, memory = self._layer_counters(), self._peak_memory()
        # Every rank counts its own tokens in its own layers.
        flat = sum_over_group(torch.cat([counters.flatten(), memory]), self.groups.world).cpu()
        layers = flat[: counters.numel()].view(counters.shape)
        peak = {"peakMemoryBytes": flat[counters.numel() :].max().item()}
        # Megatron's own layers count nothing.
        if self.model.routing is None or not layers[:, :-_SUMS].any():
            return CollectedMetrics(peak)
        choices = layers[:, :-_SUMS].round().to(torch.int64).numpy()
        routing = self.model.routing
        counts = ExpertCounts(tuple(self._moe_layers()), choices, routing.per_token, _layer_disagreement(layers))
        return CollectedMetrics(peak | self._routing_metrics(layers, routing), counts)

    def _routing_metrics(self, layers: Tensor, routing: Routing) -> dict[str, float]:
        """Return the metrics of routing from counters [layers, E + sums]."""
        loads = expert_load(layers[:, :-_SUMS])
        worst = int(loads.imbalance.argmax())
        # exp(entropy) / E is the share of experts that would do the same work if each of them had equally much.
        use = torch.exp((loads.entropy - 1) * math.log(max(routing.experts, 2)))
        fewest = COLLAPSED_CHOICES * routing.per_token
        # Counted, not tokens times layers: MTP modules have fewer tokens.
        decisions = layers[:, :-_SUMS].sum().item() / routing.per_token
        numbers = {
            "balancingLoss": layers[:, _LOSS].sum().item(),
            "routerEntropy": layers[:, _ENTROPY].sum().item() / decisions,
            "expertImbalance": loads.imbalance.mean().item(),
            "worstExpertImbalance": loads.imbalance[worst].item(),
            "worstExpertLayer": self._moe_layers()[worst],
            "idleExperts": int(loads.idle_experts.sum()),
            "idleExpertShare": loads.idle_experts.float().mean().item() / routing.experts,
            "expertUse": use.mean().item(),
            "worstExpertUse": use.min().item(),
            "collapsedLayers": float((use * routing.experts <= fewest).sum()) if fewest < routing.experts else 0.0,
        }
        if self.moe.capacity_factor is not None:
            numbers["dropRate"] = layers[:, _DROPPED].sum().item() / (decisions * routing.per_token)
        if replayed := layers[:, _REPLAYED].sum().item():
            numbers["routingDisagreement"] = layers[:, _DIFFERING].sum().item() / replayed
        return numbers

    def _layer_counters(self) -> Tensor:
        """This rank's share of [layers, E + sums], over all layers of the model that have experts."""
        places = self._moe_layers()
        experts = 0 if self.model.routing is None else self.model.routing.experts
        counters = torch.zeros((len(places), experts + _SUMS), dtype=torch.float64, device=self.device)
        for layer, balance in self._layer_balances():
            sums = torch.stack([balance.loss, balance.dropped, balance.entropy, balance.replayed, balance.differing])
            counters[places.index(layer)] = torch.cat([balance.load, sums])
        return counters

    def _peak_memory(self) -> Tensor:
        """Return a tensor with a place for each rank, where this rank fills its own: the sum over ranks has all."""
        memory = torch.zeros(self.groups.world.size, dtype=torch.float64, device=self.device)
        memory[self.groups.world.rank] = peak_memory_bytes(self.device)
        return memory

    def _moe_layers(self) -> list[int]:
        layers = (*self.model.shape.layers, *self.model.shape.mtp_layers)
        return [index for index, layer in enumerate(layers) if isinstance(layer.mlp, Experts)]

    def _layer_balances(self) -> Iterator[tuple[int, ExpertBalance]]:
        for stage in self.stages:
            for index, layer in stage.numbered_layers():
                moe = getattr(layer, "moe", None)
                if isinstance(moe, MoELayer):
                    yield index, moe.balance


def _layer_disagreement(layers: Tensor) -> NDArray[np.float64] | None:
    """Return the share of replayed choices of each layer that its router would not have made; None without a replay."""
    replayed = layers[:, _REPLAYED]
    if not replayed.any():
        return None
    shares: NDArray[np.float64] = (layers[:, _DIFFERING] / replayed.clamp(min=1)).numpy()
    return shares
