"""Keeps what `gpu_step` printed on a machine with GPUs, and writes the page: machine and stack are in the lines.

python -m benchmarks.trainer.recorded LOG...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, Better, Result, keep, table, write_page

BENCH = "training-gpu"
# Lines of a log that have it are of steps; the others are for those who read the log.
_SPEED = "tokensPerSecondPerGpu"

# By case, of one kind of GPU: H200.
_QWEN, _BEST = "Qwen3-30B-A3B, 8 layers", "gradients in bfloat16, flash-attn-4"
TARGETS = {
    f"{_QWEN}, 4x4, {_BEST}: arithmetic": 450,
    f"{_QWEN}, 2x4, {_BEST}: arithmetic": 380,
    f"{_QWEN}, 4x4, FP8, {_BEST}: arithmetic": 560,
    f"{_QWEN}, 4x4, gradients in bfloat16, ExpertInput recomputed, flash-attn-4: arithmetic": 450,
    f"{_QWEN}, 4x4, gradients in bfloat16, moments in bfloat16, Selective recomputed, flash-attn-4: arithmetic": 450,
    f"{_QWEN}, 4x4, gradients in bfloat16, moments in bfloat16, Selective recomputed, flash-attn-4: memory": 70,
    f"Mixtral-8x7B-v0.1, 2 layers, 4x4, {_BEST}: arithmetic": 560,
    f"Qwen3-30B-A3B, 24 layers, 4x2, expert 4, {_BEST}: speed": 28_000,
    f"Qwen3-30B-A3B, 24 layers, 4x2, expert 4, Flex, {_BEST}: speed": 28_000,
    f"Qwen3-30B-A3B, 24 layers, 4x2, expert 4, balanced, {_BEST}: speed": 30_000,
    f"Qwen3-30B-A3B, 16 layers, 2x8, pipeline 2, expert 2, {_BEST}: speed": 31_000,
    f"Qwen3-30B-A3B, 16 layers, 2x8, pipeline 2, expert 2, Flex, {_BEST}: speed": 31_000,
    f"Qwen3-30B-A3B, 12 layers, 4x2, tensor 2, expert 2, {_BEST}: speed": 35_000,
    f"Qwen3-30B-A3B, 12 layers, 4x2, tensor 2, expert 2, Flex, {_BEST}: speed": 35_000,
}

OVERLAPS = {"all": ", weights gathered beside the next step", "sums": "", "none": ", nothing overlapped"}

# Tokens of a document, of cases that do not say.
USUAL_LENGTH = 4096

# Cases were measured by and by, on this kind of GPU where they name no other.
_USUAL_GPU = "NVIDIA H200"
_OF_EACH = {
    "machine": _USUAL_GPU,
    "stack": "bfloat16, torch",
    "commit": "of each case in results/training-gpu.jsonl",
}


def main(logs: list[str]) -> None:
    """Appends every measured line and writes the page, with the newest of each case: no run measures all."""
    lines = (json.loads(line) for log in logs for line in Path(log).read_text().splitlines() if _SPEED in line)
    # A peer's own line is in the one that compares both.
    measured = [line for line in lines if "peer" not in line or "compared" in line]
    if not measured:
        sys.stderr.write("no speed of a step was measured: the page stays as it is\n")
        return
    first = measured[0]
    around = {"machine": first["device"], "stack": f"torch {first['torch']}, bfloat16"}
    keep([result for line in measured for result in _results(line)], around)
    write_page(BENCH, table(_newest(), _OF_EACH))


def _newest() -> list[Result]:
    lines = map(json.loads, (RESULTS / f"{BENCH}.jsonl").read_text().splitlines())
    newest = {line["case"]: line for line in lines}
    return [
        Result(
            BENCH,
            line["case"],
            line["value"],
            line["unit"],
            Better(line["better"]),
            TARGETS.get(line["case"]),
            line.get("peer"),
            line.get("peerValue"),
        )
        for line in newest.values()
    ]


def _results(line: dict[str, Any]) -> Iterator[Result]:
    name, speed = _name(line["case"], line["device"]), ("tokens/s/GPU", Better.HIGHER)
    if "compared" in line:
        kind = f"{name}: {line['compared']} beside a peer"
        ours, theirs = line[_SPEED], line["peerSpeed"]
        yield Result(BENCH, kind, ours, *speed, peer=line["peer"], peer_value=theirs)
        return
    yield Result(BENCH, f"{name}: speed", line[_SPEED], *speed)
    yield Result(BENCH, f"{name}: arithmetic", line["teraflops"], "TFLOP/s", Better.HIGHER)
    yield Result(BENCH, f"{name}: memory", line["peakGiB"], "GiB", Better.LOWER)


def _name(case: dict[str, Any], device: str) -> str:
    name = f"{case['model'].partition('/')[2]}, {case['layers']} layers, {case['micro']}x{case['accumulate']}"
    name += "".join(
        f", {key} {case[key]}" for key in ("tensor", "pipeline", "expert", "context", "data") if case[key] > 1
    )
    # Lines of older logs do not have it.
    name += ", GPTModel of Megatron-Core" if case.get("implementation") == "Megatron" else ""
    name += "" if case["sharding"] == "DistributedOptimizer" else f", {case['sharding']}"
    name += f", documents of {case['length'] // 2} to {case['length']}" if case.get("uneven") else ""
    name += f", documents of {case['length']}" if case["length"] != USUAL_LENGTH and not case.get("uneven") else ""
    name += ", experts folded" if case.get("folded") else ""
    name += "" if case.get("dispatcher", "AllToAll") == "AllToAll" else f", {case['dispatcher']}"
    name += ", balanced" if case.get("balanced") else ""
    name += f", expertTensor {case['expert_tensor']}" if case.get("expert_tensor", 1) > 1 else ""
    name += f", {case['compute']}" if case.get("compute") else ""
    name += ", gradients in bfloat16" if case["gradients"] == "bfloat16" else ""
    name += ", moments in bfloat16" if case["moments"] == "bfloat16" else ""
    name += "" if case["recompute"] == "None" else f", {' '.join(case['modules']) or case['recompute']} recomputed"
    name += f", {case['offload']:.0%} of the optimizer offloaded" if case.get("offload") else ""
    name += ", activations offloaded" if case.get("activations") else ""
    name += OVERLAPS[case.get("overlaps", "sums")]
    name += ", flash-attn-4" if case["attention"] == "flash-attn-4" else ""
    return name + ("" if device == _USUAL_GPU else f", {device.removeprefix('NVIDIA ').split()[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
