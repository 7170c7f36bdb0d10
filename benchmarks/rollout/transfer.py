"""Weights of a large model from a trainer's GPU to an engine on the same one, by CUDA IPC: seconds and bytes a second.

    MOEJOB_ROLLOUT_PYTHON=PYTHON PYTHONPATH=tests python -m benchmarks.rollout.transfer --layers 48

The weights are random and there is no model around them, so both sides of a 30B model fit one GPU of 141 GB. What the
engine computes afterwards is compared between experts that came one by one and those that came in stacks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.rollout.sides import unknown
from engines import SECRET, Engine
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.tensor_table import ExpertStacking
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetLimits
from moejob_trainer.rollouts.publisher import ProbeTerms, Publisher
from moejob_trainer.rollouts.transports.buckets import BucketRanks, pack_buckets
from moejob_trainer.rollouts.transports.ipc import IpcTransport, export_ipc_handle

LIMITS = FleetLimits(start_seconds=400)
ROUNDS = 3
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Way:
    """Sizes of what is sent, in elements."""

    name: str
    bucket: int
    stack: int


WAYS = (
    Way("one by one", 128 * _MIB, 0),
    Way("stacks, buckets of 256 MiB", 128 * _MIB, 128 * _MIB),
    Way("stacks, buckets of 512 MiB", 256 * _MIB, 256 * _MIB),
    Way("stacks, buckets of 1 GiB", 512 * _MIB, 512 * _MIB),
)


def main() -> None:
    """Measure each way, and print a JSON line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--share", type=float, default=0.5, help="the engine's part of the GPU's memory")
    parser.add_argument("--out", type=Path, default=Path("/tmp/moejob-transfer"))
    given = parser.parse_args()
    config = dict(catalog.find_config(given.model) or {}) | {"num_hidden_layers": given.layers}
    folder = given.out / "run"
    (folder / "engine-model").mkdir(parents=True)
    (folder / "engine-model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    engine = Engine(folder, given.out / "engine.log", **_sections(given.share))
    try:
        engine.await_ready()
        _measure_ways(engine.url, _Weights(config))
    finally:
        engine.kill()


def _sections(share: float) -> dict[str, Any]:
    rollout = {"placement": "Colocated", "sync": "IPC", "gpuMemoryUtilization": share}
    return {
        "resources": {"accelerator": "GPU", "gpuType": "H200", "gpusPerNode": 1},
        "model": {"dtype": "bfloat16"},
        "data": {"maxLength": 128},
        "grpo": {"maxNewTokens": 64, "rollout": rollout},
    }


class _Weights:
    """Random weights of a model, as a rank that is alone holds them."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.shape = shape_of(config)
        torch.manual_seed(1)
        self._state = {
            parameter.name: torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
            for parameter in build_tensor_table(self.shape).parameters
        }

    def named_tensors(self, stack: int) -> Iterator[tuple[str, Tensor]]:
        """Yield them for engines."""
        stacking = ExpertStacking(1, stack) if stack else None
        return hugging_face_tensors(self._state, build_tensor_table(self.shape, stacking), ModelGroups())


def _measure_ways(url: str, weights: _Weights) -> None:
    device = torch.device("cuda", 0)
    for way in WAYS:
        fleet = EngineFleet([url], EngineConnection(SECRET), LIMITS)
        text = np.arange(48, dtype=np.int32) * 7919 % weights.shape.vocabulary
        trial = ProbeTerms(text, unknown, lambda: float("inf"))
        transport = IpcTransport(BucketRanks(None, None, device), export_ipc_handle, LIMITS.start_seconds, way.bucket)
        with closing(Publisher(fleet=fleet, world=None, transport=transport, probe_terms=trial)) as publisher:
            reports = [publisher.publish(version, weights.named_tensors(way.stack)) for version in range(ROUNDS)]
        alone = [_packed_seconds(weights, way, device) for _ in range(ROUNDS)]
        _print_line(way, reports[0].size_bytes, [report.seconds for report in reports], alone, reports[-1].probe_mean)


def _packed_seconds(weights: _Weights, way: Way, device: torch.device) -> float:
    """Return the seconds in which the trainer fills buckets that no engine reads."""
    begun = time.monotonic()
    for _ in pack_buckets(weights.named_tensors(way.stack), way.bucket, device):
        torch.cuda.synchronize()
    return time.monotonic() - begun


def _print_line(way: Way, size_bytes: int, seconds: Sequence[float], alone: Sequence[float], probe: float) -> None:
    line = {
        "way": way.name,
        "gigabytes": round(size_bytes / 1e9, 2),
        "seconds": [round(one, 3) for one in seconds],
        "gigabytesPerSecond": round(size_bytes / 1e9 / min(seconds), 1),
        "trainerAloneSeconds": [round(one, 3) for one in alone],
        "probe": probe,
    }
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
