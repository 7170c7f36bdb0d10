"""Generation on this machine's GPUs: our client with one engine, vLLM alone, and what the planner says.

    MOEJOB_ROLLOUT_PYTHON=PYTHON PYTHONPATH=tests python -m benchmarks.rollout.generation --tensor 1 2

Prints a JSON line for each size of an engine and each number of answers at once as soon as it is measured. Weights are
random, so experts get about as many tokens each. Our engine and vLLM's run one after the other, for one GPU has not
the memory of both, with the same settings; `--compiled` adds vLLM with its own, which takes minutes to compile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rollout.sides import MEMBERS, Alone, our_rate, unknown
from builders import spec
from engines import SECRET, Engine
from moejob_api.hardware import job_hardware
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.planner.cost.generation import engine_speed
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetGenerator, FleetLimits
from moejob_trainer.rollouts.interface import Tokens
from moejob_trainer.rollouts.publisher import ProbeTerms, Publisher
from moejob_trainer.rollouts.transports.disk import DiskTransport

PROMPT_TOKENS, ANSWER_TOKENS, MAX_LENGTH = 128, 256, 512
LIMITS = FleetLimits(start_seconds=600)
ROUNDS = 2
# As the arguments of our engines on a GPU.
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@dataclass(frozen=True, slots=True)
class _Case:
    """One size of an engine for a model."""

    config: dict[str, Any]
    folder: Path
    tensor: int
    share: float
    gpu_type: str

    def sections(self, at_once: int = MEMBERS) -> dict[str, Any]:
        """Return the parts of a job that has this engine alone for this many answers."""
        rollout = {"placement": "Separate", "sync": "Disk", "tensor": self.tensor, "replicas": 1}
        return {
            "method": "GRPO",
            "resources": {"gpuType": self.gpu_type},
            "data": {"maxLength": MAX_LENGTH},
            "training": {"globalBatchSize": None},
            "grpo": {
                "maxNewTokens": ANSWER_TOKENS,
                "groupSize": MEMBERS,
                "promptsPerStep": at_once // MEMBERS,
                "rollout": {**rollout, "gpuMemoryUtilization": self.share},
            },
        }

    def planned_speed(self, at_once: int) -> float:
        """Return the tokens a second that the planner expects."""
        job = spec(**self.sections(at_once))
        if job.grpo is None:
            raise ValueError("the job has engines")
        engine = engine_speed(job, job.grpo, shape_of(self.config), 1, job_hardware(job.resources))
        return at_once / engine.round_seconds(at_once)


def main() -> None:
    """Measure each size, and print a line for each number of answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tensor", type=int, nargs="*", default=[1])
    parser.add_argument("--at-once", type=int, nargs="*", default=[8, 64, 256, 512])
    parser.add_argument("--share", type=float, default=0.92, help="the engine's part of the GPU's memory")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("/tmp/moejob-generation"))
    given = parser.parse_args()
    config = dict(catalog.find_config(given.model) or {})
    if given.layers:
        config["num_hidden_layers"] = given.layers
    gpu_type = "H200" if "H200" in torch.cuda.get_device_name() else "H100"
    for tensor in given.tensor:
        case = _Case(config, given.out / str(tensor), tensor, given.share, gpu_type)
        (case.folder / "engine-model").mkdir(parents=True)
        (case.folder / "engine-model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for side, at_once, rates in _measure_sides(case, given.at_once, is_compiled=given.compiled):
            line = {
                "side": side,
                "layers": config["num_hidden_layers"],
                "tensor": tensor,
                "atOnce": at_once,
                "tokensPerSecond": [round(rate) for rate in rates],
                "planned": round(case.planned_speed(at_once)),
                "device": torch.cuda.get_device_name(),
            }
            sys.stdout.write(f"{json.dumps(line)}\n")
            sys.stdout.flush()


def _measure_sides(case: _Case, counts: Sequence[int], *, is_compiled: bool) -> Iterator[tuple[str, int, list[float]]]:
    yield from (("ours", *one) for one in _ours(case, counts))
    for side, settings in (("vLLM", {"compilation_config": _GRAPHS}), ("vLLM, compiled", {})):
        if settings or is_compiled:
            yield from ((side, *one) for one in _vllm(case, counts, settings))


def _ours(case: _Case, counts: Sequence[int]) -> Iterator[tuple[int, list[float]]]:
    engine = Engine(case.folder, case.folder / "engine.log", **case.sections())
    try:
        engine.await_ready()
        fleet = EngineFleet([engine.url], EngineConnection(SECRET), LIMITS)
        text = np.arange(48, dtype=np.int32) * 7919 % int(case.config["vocab_size"])
        trial = ProbeTerms(text, unknown, lambda: float("inf"))
        transport = DiskTransport(case.folder / "weights", None, LIMITS.start_seconds)
        with closing(Publisher(fleet=fleet, world=None, transport=transport, probe_terms=trial)) as publisher:
            # Answers are of weights that were published; one tensor is enough for a name.
            one = torch.ones(int(case.config["hidden_size"]), dtype=torch.bfloat16)
            publisher.publish(0, iter([("model.norm.weight", one)]))
            generator = FleetGenerator(fleet)
            for at_once in counts:
                yield (
                    at_once,
                    [
                        asyncio.run(our_rate(generator, number, prompts, ANSWER_TOKENS))
                        for number, prompts in enumerate(_rounds(case, at_once))
                    ],
                )
    finally:
        engine.kill()


def _vllm(case: _Case, counts: Sequence[int], settings: dict[str, Any]) -> Iterator[tuple[int, list[float]]]:
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_PLUGINS": ""}
    common = {
        "model": str(case.folder / "engine-model"),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": MAX_LENGTH + ANSWER_TOKENS,
        "tensor_parallel_size": case.tensor,
        "gpu_memory_utilization": case.share,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }
    with Alone(case.folder, quiet, {**common, **settings}, ANSWER_TOKENS) as alone:
        for at_once in counts:
            yield at_once, [alone.rate(prompts) for prompts in _rounds(case, at_once)]


def _rounds(case: _Case, at_once: int) -> list[list[Tokens]]:
    """The prompts of each round: no round has another's, for an engine remembers what it has read."""
    random, vocabulary = np.random.default_rng(at_once), int(case.config["vocab_size"])
    groups = at_once // MEMBERS
    return [
        [random.integers(2, vocabulary, PROMPT_TOKENS).astype(np.int32) for _ in range(groups)] for _ in range(ROUNDS)
    ]


if __name__ == "__main__":
    main()
