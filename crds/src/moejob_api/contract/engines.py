"""The engines of a job as trainer, engines, operator and `moejob run` agree on them: how many, where, and fed how."""

from __future__ import annotations

from collections.abc import Iterable

from moejob_api.job import Spec
from moejob_api.job.grpo import RolloutPlacement, WeightTransport
from moejob_api.job.resources import Accelerator

# The trainer closes connections that are idle, long before an engine would: a request that meets an engine's closing
# has no answer, and the engine would count as lost.
SERVER_IDLE_SECONDS, CLIENT_IDLE_SECONDS = 300, 60.0


def weight_transport(spec: Spec) -> WeightTransport:
    """Return the transport of weights, never Auto."""
    if spec.grpo is None:
        raise ValueError(f"method {spec.method} has no engines")
    rollout = spec.grpo.rollout
    if rollout.sync is not WeightTransport.AUTO:
        return rollout.sync
    if spec.resources.accelerator is Accelerator.CPU:
        return WeightTransport.DISK
    return WeightTransport.IPC if rollout.placement is RolloutPlacement.COLOCATED else WeightTransport.NCCL


def colocated_per_pod(spec: Spec, ranks: int) -> int:
    """Return the engines that share a trainer pod of this many ranks. Cores, unlike GPUs, are shared: one engine."""
    if spec.grpo is None or spec.grpo.rollout.placement is not RolloutPlacement.COLOCATED:
        return 0
    return 1 if spec.resources.accelerator is Accelerator.CPU else ranks // spec.grpo.rollout.tensor


def separate_engines(spec: Spec) -> int:
    """Return the engines that have pods of their own."""
    if spec.grpo is None or spec.grpo.rollout.placement is not RolloutPlacement.SEPARATE:
        return 0
    return spec.grpo.rollout.replicas or 1


def engine_urls(hosts: Iterable[str], per_host: int, first_port: int) -> tuple[str, ...]:
    """Return the addresses of all engines, host by host: the index of an engine is its place here."""
    return tuple(f"http://{host}:{first_port + number}" for host in hosts for number in range(per_host))
