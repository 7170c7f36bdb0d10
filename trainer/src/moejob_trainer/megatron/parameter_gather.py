"""Updated weights on their way to all replicas: before the next pass begins, or beside it, layer by layer.

Megatron waits before the call of every module for the parameters of that module alone. Where a module reads the matrix
of another one, it would compute with old weights. Here a layer waits for all parameters inside it, and code that reads
weights without calling a layer waits for all gathers first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import nn


class ParameterGather:
    """The gathers of one stage's weights from the replicas that updated them."""

    def __init__(self, chunk: DistributedDataParallel) -> None:
        self._is_overlapped = chunk.ddp_config.overlap_param_gather
        if not self._is_overlapped:
            self._groups = exchanged_buckets(chunk)
            return
        chunk.disable_forward_pre_hook(param_sync=False)
        exchanged = exchanged_buckets(chunk)
        of_units = {unit: _unit_groups(chunk, unit, exchanged) for unit in _called_units(chunk.module)}
        # In the order of the forward pass, and so the same on all replicas: they hold the same stage.
        self._groups = [*dict.fromkeys(group for groups in of_units.values() for group in groups)]
        for unit, groups in of_units.items():
            unit.register_forward_pre_hook(lambda *_, groups=groups: _finish_groups(groups))

    def start_gather(self) -> None:
        """Gather the shares of all ranks; return when all have arrived, or at once if gathers are overlapped."""
        self.finish_gather()
        for group in self._groups:
            group.start_param_sync(force_sync=not self._is_overlapped)

    def finish_gather(self) -> None:
        """Wait for all gathers."""
        _finish_groups(self._groups)


def exchanged_buckets(chunk: DistributedDataParallel) -> list[Any]:
    """Return Megatron's bucket groups that have more than one replica."""
    groups = (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    return [group for group in groups if group.intra_distributed_optimizer_instance_size > 1]


def _called_units(stage: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a stage calls one after another: embedding, each layer, norm, output layer."""
    for child in stage.children():
        yield from child.children() if isinstance(child, (nn.ModuleDict, nn.ModuleList)) else (child,)


def _unit_groups(chunk: DistributedDataParallel, unit: nn.Module, exchanged: Sequence[Any]) -> list[Any]:
    """Return the bucket groups of a unit's parameters; frozen parameters are in none."""
    of_parameters = chunk.param_to_bucket_group
    groups = dict.fromkeys(of_parameters[parameter] for parameter in unit.parameters() if parameter in of_parameters)
    return [group for group in groups if group in exchanged]


def _finish_groups(groups: Iterable[Any]) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)
