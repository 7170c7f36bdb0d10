"""Weights straight from parallel shards into a real engine, by broadcast: both then say the same of the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from engines import SECRET, Engine
from moejob_api.contract.pods import weights_key
from moejob_api.layout.sizes import derive_layout
from moejob_api.models.shape import Family
from moejob_trainer.data.packing import batch_plan
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.probe import TrainerProbe, probe_bound
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetLimits
from moejob_trainer.rollouts.interface import Floats, SyncReport
from moejob_trainer.rollouts.publisher import ProbeTerms, Publisher
from moejob_trainer.rollouts.transports.broadcast import BroadcastTransport, EngineRendezvous, make_gloo_group
from moejob_trainer.rollouts.transports.buckets import BucketRanks
from rollout.references import lay_out, make_model
from trainer.parity.cells import Cell, make_loss, micro_batches, start_engine
from trainer.rows import make_rows
from trainer.worlds import Worlds

LIMITS = FleetLimits(start_seconds=900, silence_seconds=300, look_seconds=0.2)
# A layer is several buckets.
ELEMENTS = 50_000
CLOSE = 1e-4
UPDATES = 20
FAMILIES = {Family.QWEN3_MOE: "qwen3_moe", Family.MIXTRAL: "mixtral", Family.QWEN2: "qwen2"}
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "alone": {},
    "TP2": {"parallelism": {"tensor": 2}},
    "EP2": {"parallelism": {"expert": 2}},
    "PP2": {"parallelism": {"pipeline": 2}},
    "CP2": {"parallelism": {"context": 2}},
    "DP2": {"parallelism": {"data": 2}},
    "FSDP over DP2": {"parallelism": {"data": 2}, "memory": {"sharding": "FSDP"}},
}


@dataclass(frozen=True)
class Served:
    """A model, and the engine that serves it."""

    folder: Path
    engine: Engine


@dataclass(frozen=True)
class Published:
    """The reports of two publications, and what the trainer said of the probe at each."""

    reports: tuple[SyncReport, SyncReport]
    probes: tuple[Floats, Floats]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Family], Served]]:
    """Starts one engine of each family that is asked for."""
    found: dict[Family, Served] = {}

    def of(family: Family) -> Served:
        if family not in found:
            name = FAMILIES[family]
            found[family] = _served(name, tmp_path_factory.mktemp(name))
            # Ranks have less patience with one another than an engine takes to start on a busy machine.
            found[family].engine.await_ready()
        return found[family]

    yield of
    for one in found.values():
        one.engine.kill()


def _served(name: str, folder: Path) -> Served:
    lay_out(name, folder / "engine-model")
    make_model(name, 7).save_pretrained(folder / "first")
    job: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "data": {"maxLength": 64},
        "grpo": {"maxNewTokens": 64, "rollout": {"placement": "Separate", "sync": "Gloo"}},
    }
    return Served(folder, Engine(folder, folder / "engine.log", **job))


@pytest.mark.parametrize(
    ("family", "name"),
    make_rows(
        [
            *((Family.QWEN3_MOE, name) for name in LAYOUTS),
            *((Family.MIXTRAL, name) for name in ("TP2", "EP2", "FSDP over DP2")),
            *((Family.QWEN2, name) for name in ("TP2", "PP2", "FSDP over DP2")),
        ],
        [(Family.QWEN3_MOE, name) for name in LAYOUTS],
    ),
)
def test_an_engine_computes_what_the_ranks_do_before_and_after_twenty_updates(
    served: Callable[[Family], Served], worlds: Worlds, family: Family, name: str
) -> None:
    one, cell = served(family), Cell(family, LAYOUTS[name])
    for found in worlds.run(cell.ranks(), published, cell, one.folder, one.engine.url):
        first, second = found.probes
        assert abs(first - second).mean() > 0.01
        assert [report.version for report in found.reports] == [1, 2]
        assert all(report.probe_mean < CLOSE for report in found.reports)
        # Rounding of float32 moves the trainer's own by less than would loosen it.
        assert {report.probe_bound for report in found.reports} == {1e-3}
        # Each tensor once, from one of its owners.
        assert {report.size_bytes for report in found.reports} == {_size_bytes(FAMILIES[family])}


def published(cell: Cell, folder: Path, url: str) -> Published:
    """Publish, learn, and publish again; one rank's part."""
    use_cpu()
    control, spec = dist.new_group(backend="gloo"), cell.spec()
    engine = start_engine(cell, folder)
    probe = TrainerProbe(engine, batch_plan(spec, derive_layout(spec.parallelism, 8), pad_token=0))
    text = np.arange(spec.data.max_length, dtype=np.int32) * 7919 % engine.model.shape.vocabulary

    def bound() -> float:
        return probe_bound(torch.float32, probe.measure_rounding(text, torch.float32))

    publisher = _publisher(control, url, ProbeTerms(text, probe, bound))
    try:
        first = (
            publisher.publish(1, engine.export_weights(publisher.stacked_elements)),
            probe(publisher.probe_terms.tokens),
        )
        loss = make_loss(cell, engine)
        for step in range(UPDATES):
            engine.update(micro_batches(cell, engine, step), loss)
        second = (
            publisher.publish(2, engine.export_weights(publisher.stacked_elements)),
            probe(publisher.probe_terms.tokens),
        )
    finally:
        publisher.close()
        stop_groups()
    return Published((first[0], second[0]), (first[1], second[1]))


def _publisher(control: dist.ProcessGroup, url: str, trial: ProbeTerms) -> Publisher:
    fleet = EngineFleet([url], EngineConnection(SECRET), LIMITS) if control.rank() == 0 else None
    ranks = BucketRanks(control, control if control.size() > 1 else None, torch.device("cpu"))
    meeting = EngineRendezvous("127.0.0.1", weights_key(SECRET), 1, make_gloo_group, LIMITS.start_seconds)
    return Publisher(
        fleet=fleet, world=control, transport=BroadcastTransport(ranks, meeting, ELEMENTS), probe_terms=trial
    )


def _size_bytes(name: str) -> int:
    return sum(parameter.nbytes for parameter in make_model(name, 7).parameters())
