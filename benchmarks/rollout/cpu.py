"""GRPO on this machine's CPU with real vLLM: generation beside vLLM alone, synchronization, and the phases of a step.

    python -m benchmarks.rollout.cpu

Our client with one engine and vLLM alone take turns with the same prompts, each idle while the other generates. Steps
are those of `benchmarks.rollout.ahead`, synchronous and with staleness. Nothing is learned: weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from benchmarks.record import Better, Result, record
from benchmarks.rollout.ahead import measure_variants, parse_options
from benchmarks.rollout.models import write_model
from benchmarks.rollout.sides import MEMBERS, Alone, our_rate
from engines import PYTHON, SECRET, Engine
from moejob_api.contract.pods import weights_key
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetGenerator, FleetLimits
from moejob_trainer.rollouts.interface import SyncReport, Tokens
from moejob_trainer.rollouts.publisher import EngineTransport, ProbeTerms, Publisher
from moejob_trainer.rollouts.transports.broadcast import BroadcastTransport, EngineRendezvous, make_gloo_group
from moejob_trainer.rollouts.transports.buckets import BucketRanks
from moejob_trainer.rollouts.transports.disk import DiskTransport

GROUPS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 24, 32
ROUNDS, SYNCS = 6, 5
# A few answers are several times as long as the mean, which the vocabulary gives.
STEPS = "--steps 6 --prompts 4 --group 4 --vocabulary 384 --answer-tokens 1024"
VARIANTS = ("separate-0", "separate-1", "separate-4", "colocated-0", "colocated-1")
LIMITS = FleetLimits(start_seconds=900)
PHASES = ("syncSeconds", "generateSeconds", "outputsSeconds", "learnSeconds")
# vLLM alone gets as much memory for keys and values.
_CACHE_BYTES = 512 * 1024**2


def main() -> None:
    """Measure everything and write the page."""
    begun = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = _model(folder / "model")
        with _alone(folder, folder / "model") as alone:
            pairs, disk = _serve_model(folder / "disk", model, "Disk", alone)
        _, broadcast = _serve_model(folder / "gloo", model, "Gloo", None)
        results = [
            *_generation(pairs),
            *_synchronization("Disk", disk),
            *_synchronization("Gloo", broadcast),
            *_steps(measure_variants(_step_options(folder))),
        ]
    load = f"load average {begun:.1f} before and {os.getloadavg()[0]:.1f} after"
    record(results, ["torch", "transformers"], f"vllm {_vllm_version()}, {load}")
    for result in results:
        print(f"{result.case:70} {result.value:12.4g} {result.unit}")


def _model(folder: Path) -> PreTrainedModel:
    """Make a model large enough to take an engine's time, small enough for a CPU."""
    return write_model(
        folder,
        torch.float32,
        hidden_size=384,
        intermediate_size=768,
        moe_intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
    )


def _step_options(folder: Path) -> argparse.Namespace:
    folders = ["--work", str(folder / "ahead"), "--out", str(folder / "ahead-logs")]
    return parse_options([*folders, *STEPS.split(), "--variants", *VARIANTS])


def _rounds() -> list[list[Tokens]]:
    """The prompts of each round: no round has another's, for an engine remembers what it has read."""
    random = np.random.default_rng(0)
    return [[random.integers(2, 500, PROMPT_TOKENS).astype(np.int32) for _ in range(GROUPS)] for _ in range(ROUNDS)]


# --- our client -------------------------------------------------------------------------------------------------------


def _serve_model(
    folder: Path, model: PreTrainedModel, sync: str, alone: Alone | None
) -> tuple[list[tuple[float, float]], list[SyncReport]]:
    """Tokens a second of each round, ours and those of vLLM alone; the reports of several synchronizations."""
    model.config.save_pretrained(folder / "engine-model")
    rollout = {"placement": "Separate", "sync": sync}
    sections: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "data": {"maxLength": 128},
        "grpo": {"maxNewTokens": ANSWER_TOKENS, "rollout": rollout},
    }
    engine = Engine(folder, folder / "engine.log", **sections)
    try:
        engine.await_ready()
        return _through(engine.url, model, _transport(sync, folder), alone)
    finally:
        engine.kill()


def _transport(sync: str, folder: Path) -> EngineTransport:
    if sync == "Disk":
        return DiskTransport(folder / "weights", None, LIMITS.start_seconds)
    alone = BucketRanks(None, None, torch.device("cpu"))
    return BroadcastTransport(
        alone, EngineRendezvous("127.0.0.1", weights_key(SECRET), 1, make_gloo_group, LIMITS.start_seconds)
    )


def _through(
    url: str, model: PreTrainedModel, transport: EngineTransport, alone: Alone | None
) -> tuple[list[tuple[float, float]], list[SyncReport]]:
    fleet = EngineFleet([url], EngineConnection(SECRET), LIMITS)
    text = np.arange(48, dtype=np.int32) * 7919 % model.config.vocab_size
    trial = ProbeTerms(text, lambda tokens: _log_probabilities(model, tokens), lambda: 1e-3)
    weights = _tensors(model)
    with closing(Publisher(fleet=fleet, world=None, transport=transport, probe_terms=trial)) as publisher:
        reports = [publisher.publish(version, iter(weights.items())) for version in range(SYNCS)]
        generator = FleetGenerator(fleet)
        if alone is None:
            return [], reports
        # By turns: what else the machine does, it does to both.
        pairs = [
            (asyncio.run(our_rate(generator, number, prompts, ANSWER_TOKENS)), alone.rate(prompts))
            for number, prompts in enumerate(_rounds())
        ]
        return pairs, reports


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Under the names of the hub's files."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def _log_probabilities(model: PreTrainedModel, tokens: Tokens) -> Any:
    row = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        rows = torch.log_softmax(model(row).logits[0].float(), -1)[:-1]
    return rows.gather(1, row[0, 1:, None])[:, 0].numpy()


# --- vLLM alone -------------------------------------------------------------------------------------------------------


def _alone(folder: Path, model: Path) -> Alone:
    """vLLM and nothing of ours but the plugin's corrections for the CPU."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    settings = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 128 + ANSWER_TOKENS,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": _CACHE_BYTES,
        "skip_tokenizer_init": True,
    }
    return Alone(
        folder, {**quiet, "VLLM_PLUGINS": "moejob", "VLLM_CPU_OMP_THREADS_BIND": cores}, settings, ANSWER_TOKENS
    )


def _vllm_version() -> str:
    command = [str(PYTHON), "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


# --- results ----------------------------------------------------------------------------------------------------------


def _generation(pairs: Sequence[tuple[float, float]]) -> list[Result]:
    """The first round is left out: memory is touched for the first time, and vLLM alone has to start."""
    mine, theirs = (float(np.median(rates)) for rates in zip(*pairs[1:], strict=True))
    share = float(np.median([ours / alone for ours, alone in pairs[1:]]))
    case = f"generation, {GROUPS} x {MEMBERS} answers of {ANSWER_TOKENS} tokens"
    return [
        Result("grpo", case, mine, "tokens/s", Better.HIGHER, peer="vLLM alone", peer_value=theirs),
        Result("grpo", "generation: share of the speed of vLLM alone", share, "", Better.HIGHER, 0.95),
    ]


def _synchronization(sync: str, reports: Sequence[SyncReport]) -> list[Result]:
    """The first of all is left out: the engine joins a group in it."""
    seconds = float(np.median([report.seconds for report in reports[1:]]))
    size = reports[-1].size_bytes
    case = f"synchronization of {size / 1e6:.0f} MB by {sync}, with its probe"
    return [
        Result("grpo", case, seconds, "s", Better.LOWER),
        Result("grpo", f"{case}: speed", size / seconds / 1e6, "MB/s", Better.HIGHER),
    ]


def _steps(variants: Iterable[Mapping[str, Any]]) -> list[Result]:
    """A step of each variant, and its speed beside the synchronous one with the same placement."""
    found, synchronous = [], dict[str, Mapping[str, Any]]()
    for summary in variants:
        placement, staleness = summary["variant"].split("-")
        first = synchronous.setdefault(placement, summary)
        name = f"a step, {placement.capitalize()} with staleness {staleness}"
        speed = first["stepSeconds"] / summary["stepSeconds"]
        tokens = summary["answerTokensPerSecond"] / first["answerTokensPerSecond"]
        found += [
            Result("grpo", f"{name}, {summary['steps']} steps", summary["stepSeconds"], "s", Better.LOWER),
            *(
                Result("grpo", f"{name}: share of {phase}", summary[phase] / summary["stepSeconds"], "", Better.LOWER)
                for phase in PHASES
            ),
            Result("grpo", f"{name}: trainers wait", summary["trainerWaitShare"], "", Better.LOWER),
            Result("grpo", f"{name}: engines wait", summary["engineWaitShare"], "", Better.LOWER),
            Result("grpo", f"{name}: times as fast as synchronous", speed, "", Better.HIGHER),
            Result("grpo", f"{name}: times as fast by tokens", tokens, "", Better.HIGHER),
        ]
    return found


if __name__ == "__main__":
    main()
