"""Stages divided over replicas (ZeRO-3): torch's fully_shard over the groups of the layout, beside
shares of experts' matrices that travel without being copied.

Weights are divided over the ranks that see other documents. A layer is whole, in the model's type, while it computes
(ZeRO-3), or from its first pass to the update (ZeRO-2). torch gives a share gradients in the type of the share: shares
have the model's type where gradients are summed in it, else they are float32 and rounded at every gather. Knows nothing
of steps, optimizers or files.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from moejob_api.job.base import Dtype
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.megatron.expert_shares import ExpertShares, divide_experts, take_matrices
from moejob_trainer.megatron.shares import ReplicaSharding, WeightTypes, local_part, share_elements
from moejob_trainer.model.layer import TransformerLayer
from moejob_trainer.model.linear import is_expert
from moejob_trainer.model.moe_layer import LocalExperts
from moejob_trainer.model.stage import Stage


def weight_types(weights: Dtype, gradients: Dtype) -> WeightTypes:
    """Return the types that a job asks for."""
    return WeightTypes(getattr(torch, weights.value), getattr(torch, gradients.value))


def fully_shard_stage(
    stage: Stage, types: WeightTypes, groups: Groups, device: torch.device, *, reads: bool = False
) -> Stage:
    """Return a stage from the meta device as this rank's shares on a real device, with undefined values.

    reads: replicas copy experts' shares from one another's memory, where that is in reach.
    """
    marks = {name: dict(vars(parameter)) for name, parameter in stage.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in stage.named_parameters()}
    matrices = take_matrices(stage)
    _flatten_matrices(stage)
    _shard_modules(stage, types, device)
    _allocate_shares(stage, device)
    for module in _fsdp_modules(stage):
        # Torch moves padded shares at the first gather. Gather once now: later the optimizer keeps views of them.
        module.unshard()
        module.reshard()
    experts = divide_experts(matrices, types, groups.expert_replicas, device, reads=reads)
    if experts is not None:
        experts.register_hooks(stage)
        vars(stage)["expert_shares"] = experts
    for name, parameter in stage.named_parameters():
        vars(parameter).update(marks[name])
        group = groups.expert_replicas if is_expert(parameter) else groups.replicas
        _mark_sharded(
            parameter, ReplicaSharding(shapes[name], types.weights, group, share_elements(shapes[name], group))
        )
    return stage


def keep_gathered(stage: Stage) -> None:
    """Gather each layer once a step: it stays whole through all passes until the update (ZeRO-2)."""
    for module in _fsdp_modules(stage):
        _keep_gathered_module(module)
    if (experts := _find_expert_shares(stage)) is not None:
        experts.keep_whole()


def keep_beside_experts(stage: Stage, layers: int) -> None:
    """Keep the embedding, the output layer and the first layers without their experts whole until the update.

    The matrices of the vocabulary are whole anyway at the peak of memory, behind the last layer.
    """
    for module in (stage, *[*stage.layers.values()][:layers]):
        if isinstance(module, FSDPModule):
            _keep_gathered_module(module)


def _keep_gathered_module(module: FSDPModule) -> None:
    module.set_reshard_after_forward(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)


def reshard_stage(stage: nn.Module) -> None:
    """Free gathered weights, and keep the shares of this rank."""
    for module in _fsdp_modules(stage):
        module.reshard()
    if (experts := _find_expert_shares(stage)) is not None:
        experts.free_layers()


def finish_expert_sums(stage: nn.Module) -> None:
    """Wait for the sums of experts' gradients; torch finishes its own at the end of the backward pass."""
    if (experts := _find_expert_shares(stage)) is not None:
        experts.finish_sums()


def _find_expert_shares(stage: nn.Module) -> ExpertShares | None:
    return getattr(stage, "expert_shares", None)


def _flatten_matrices(stage: Stage) -> None:
    """Flatten parameters of more than two axes to matrices: fully_shard divides the first axis.

    gate_up [2, f, h] would divide over two ranks only, [2 f, h] divides over any number. Layers restore the axes.
    """
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 2:
                flat = nn.Parameter(parameter.detach().flatten(0, -2), requires_grad=parameter.requires_grad)
                setattr(module, name, flat)


def _shard_modules(stage: Stage, types: WeightTypes, device: torch.device) -> None:
    """Shard each layer by itself, and its experts apart from it: their replicas are other ranks."""
    replicas = _device_mesh(parallel_state.get_data_parallel_group(with_context_parallel=True), device)
    expert_replicas = _device_mesh(parallel_state.get_expert_data_parallel_group(), device)
    # No cast of inputs: document boundaries are integers, and angles stay float32.
    policy = MixedPrecisionPolicy(types.weights, types.gradients, cast_forward_inputs=False)
    for layer in [module for module in stage.modules() if isinstance(module, TransformerLayer)]:
        for experts in [module for module in layer.modules() if isinstance(module, LocalExperts)]:
            # Their biases and adapters.
            if any(True for _ in experts.parameters()):
                fully_shard(experts, mesh=expert_replicas, mp_policy=policy)
        fully_shard(layer, mesh=replicas, mp_policy=policy)
    fully_shard(stage, mesh=replicas, mp_policy=policy)
    for module in _fsdp_modules(stage):
        # Gradients are sums, since the loss is divided by the weight of the global batch. gloo has no scaled sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)


def _fsdp_modules(stage: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


def _device_mesh(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, device.type)


def _allocate_shares(stage: Stage, device: torch.device) -> None:
    """Allocate the shares, and zero the buffers. A tied matrix stays one parameter under two names."""
    new_parameters: dict[nn.Parameter, nn.Parameter] = {}
    for module in stage.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001 named_parameters names a tied one once
            if parameter is not None:
                if parameter not in new_parameters:
                    empty = torch.empty_like(parameter, device=device)
                    new_parameters[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = new_parameters[parameter]  # noqa: SLF001
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device=device))


def _mark_sharded(parameter: nn.Parameter, sharded: ReplicaSharding) -> None:
    held_elements = local_part(parameter).numel()
    if held_elements != sharded.stop - sharded.start:
        raise RuntimeError(
            f"torch holds {held_elements} elements of a share of {sharded.stop - sharded.start}; report this"
        )
    parameter.sharded = sharded  # type: ignore[attr-defined]
