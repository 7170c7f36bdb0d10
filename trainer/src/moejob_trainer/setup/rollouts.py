"""The engines of a GRPO run, as rank 0 finds them in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from moejob_api.contract.engines import separate_engines, weight_transport
from moejob_api.contract.pods import Environment, RunPhase, weights_key
from moejob_api.job import Spec
from moejob_api.job.grpo import CacheAcrossVersions, ProbeMismatch, WeightTransport
from moejob_api.job.resources import Accelerator
from moejob_api.models.shape import ModelShape
from moejob_trainer.data.packing import batch_plan
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron.gpu_memory import TrainerGpuMemory
from moejob_trainer.megatron.probe import PROBE_PROMPTS, PROBE_TOKENS, TrainerProbe, probe_bound, probe_text
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetGenerator, FleetLimits
from moejob_trainer.rollouts.interface import RoutedLayers, Tokens
from moejob_trainer.rollouts.publisher import EngineTerms, EngineTransport, ProbeTerms, Publisher, SharedGpuMemory
from moejob_trainer.rollouts.transports.broadcast import (
    BroadcastTransport,
    EngineRendezvous,
    MakeGroup,
    make_gloo_group,
    nccl_group_maker,
)
from moejob_trainer.rollouts.transports.buckets import BucketRanks
from moejob_trainer.rollouts.transports.disk import DiskTransport
from moejob_trainer.rollouts.transports.ipc import IpcTransport, export_ipc_handle
from moejob_trainer.runtime.heartbeats import Heartbeat, ShareReport
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.grpo import RolloutEngines
from moejob_trainer.setup.prompts import RunPrompts

_FOLDER = "weights"
# An engine hangs that keeps a request for this many times answerTimeoutSeconds.
_HANGING_TIMEOUTS = 4
# A day: longer than any answer takes.
_ANY_SECONDS = 86_400.0
_TOKEN_IDS = TypeAdapter(list[int])


def connect_engines(
    context: RankContext, engine: MegatronTrainingEngine, prompts: RunPrompts, stack: ExitStack
) -> RolloutEngines:
    """Connect rank 0 to the engines; every rank takes part in giving them weights."""
    limits, is_first = fleet_limits(context.spec), context.environment.rank == 0
    fleet = (
        EngineFleet(
            _read_engine_urls(os.environ),
            EngineConnection(os.environ.get(Environment.SECRET)),
            limits,
            context.stop.is_requested,
            engine_start_report(context.heartbeat),
        )
        if is_first
        else None
    )
    publisher = Publisher(
        fleet=fleet,
        world=context.control,
        transport=_build_transport(context, limits.start_seconds),
        probe_terms=_build_probe_terms(context, engine, prompts),
        engine_terms=EngineTerms(
            gpu_memory=_shared_gpu_memory(context.spec, engine),
            is_colocated=separate_engines(context.spec) == 0,
            keeps_cache=keeps_cache(context.spec),
        ),
    )
    stack.callback(publisher.close)
    generator = None if fleet is None else FleetGenerator(fleet, salts_cache=keeps_cache(context.spec))
    return RolloutEngines(generator, publisher, routed_layers(context.spec, engine.model.shape))


def engine_start_report(heartbeat: Heartbeat) -> ShareReport:
    """Return what shows the start of engines as a phase of this rank, with the share of engines that have started.

    How far the start of one engine is cannot be asked: vLLM listens when it is done, and the bars of its log are no
    interface. Of a run with one engine the phase has its seconds alone.
    """

    def report_ready(ready: int, total: int) -> None:
        if ready == total:
            heartbeat.enter_phase(RunPhase.FIRST_STEP)
            return
        heartbeat.enter_phase(RunPhase.AWAITING_ENGINES)
        if total > 1:
            heartbeat.report_share(ready, total)

    return report_ready


def keeps_cache(spec: Spec) -> bool:
    """Return whether an unfinished answer continues with keys and values of the older weights."""
    return spec.grpo is not None and spec.grpo.rollout.cache_across_versions is CacheAcrossVersions.KEEP


def fleet_limits(spec: Spec) -> FleetLimits:
    """The times of a fleet: the job's for an answer, and the defaults.

    A step that waits for an answer gives it up earlier, and loses no engine by it: objectives/grpo/group_queue.py.
    """
    if spec.grpo is None:
        return FleetLimits()
    rollout = spec.grpo.rollout
    # With staleness, an answer may take longer as long as no step waits for it.
    hanging_seconds = _HANGING_TIMEOUTS * float(rollout.answer_timeout_seconds)
    return FleetLimits(answer_seconds=_ANY_SECONDS if rollout.staleness else hanging_seconds)


def _build_probe_terms(context: RankContext, engine: MegatronTrainingEngine, prompts: RunPrompts) -> ProbeTerms:
    """Build the probe that ends each publication. All ranks call this together."""
    if context.spec.grpo is None:
        raise ValueError(f"method {context.spec.method} has no engines")
    settings = context.spec.grpo.rollout.probe
    tokens = _probe_tokens(context, prompts)
    probe = TrainerProbe(engine, batch_plan(context.spec, context.layout, pad_token=0))
    dtype = getattr(torch, context.spec.model.dtype.value)

    def bound() -> float:
        return probe_bound(dtype, probe.measure_rounding(tokens, dtype)) if settings.bound is None else settings.bound

    return ProbeTerms(tokens, probe, bound, only_warns=settings.on_mismatch is ProbeMismatch.WARN)


def _probe_tokens(context: RankContext, prompts: RunPrompts) -> Tokens:
    # An engine that reads a text generates one more token.
    length = max(2, min(PROBE_TOKENS, context.spec.data.max_length - 1))

    def read_text() -> list[int]:
        if prompts.sets is None:
            raise ValueError("rank 0 has the prompts")
        return probe_text([prompt.tokens for prompt in prompts.sets.training.first_prompts(PROBE_PROMPTS)], length)

    return np.array(context.on_first_rank(read_text, _TOKEN_IDS), np.int32)


def routed_layers(spec: Spec, shape: ModelShape) -> RoutedLayers | None:
    """Return the layers whose routing engines tell and the trainer replays, where the job asks for it."""
    if spec.grpo is None or not spec.grpo.routing_replay or shape.experts is None:
        return None
    return RoutedLayers(len(shape.layers), shape.routed_layers, shape.experts.count, shape.experts.per_token)


def _build_transport(context: RankContext, start_seconds: float) -> EngineTransport:
    device = context.placement.device
    on_cpu = BucketRanks(context.control, _group_unless_alone(context.control), torch.device("cpu"))
    on_gpu = BucketRanks(context.control, _group_unless_alone(dist.group.WORLD), device)
    match weight_transport(context.spec):
        case WeightTransport.GLOO:
            return BroadcastTransport(on_cpu, _engine_rendezvous(context.spec, make_gloo_group, start_seconds))
        case WeightTransport.NCCL:
            return BroadcastTransport(on_gpu, _engine_rendezvous(context.spec, nccl_group_maker(device), start_seconds))
        case WeightTransport.IPC:
            return IpcTransport(on_gpu, export_ipc_handle, start_seconds)
        case _:
            return DiskTransport(context.environment.folder / _FOLDER, context.control, start_seconds)


def _group_unless_alone(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return None if group is None or group.size() == 1 else group


def _engine_rendezvous(spec: Spec, make_group: MakeGroup, start_seconds: float) -> EngineRendezvous:
    if spec.grpo is None:
        raise ValueError(f"method {spec.method} has no engines")
    host, key = os.environ[Environment.HOST], weights_key(os.environ.get(Environment.SECRET, ""))
    return EngineRendezvous(host, key, spec.grpo.rollout.tensor, make_group, start_seconds)


def _shared_gpu_memory(spec: Spec, engine: MegatronTrainingEngine) -> SharedGpuMemory | None:
    """The room of engines on the trainer's GPUs; others share no memory with it."""
    shares_gpus = spec.resources.accelerator is Accelerator.GPU and separate_engines(spec) == 0
    return TrainerGpuMemory(spec, engine) if shares_gpus else None


def _read_engine_urls(environ: Mapping[str, str]) -> list[str]:
    urls = [url for url in environ.get(Environment.ROLLOUT_URLS, "").split(",") if url]
    if not urls:
        raise BadConfiguration(
            f"{Environment.ROLLOUT_URLS} names no engine, and GRPO needs one to generate answers; start rollout engines"
        )
    return urls
