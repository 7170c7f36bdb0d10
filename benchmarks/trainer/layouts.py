"""Layouts of one job over two or four GPUs in the order that the cost model says, and in the order of measured steps.

    torchrun --nproc-per-node 2 --max-restarts 15 -m benchmarks.trainer.layouts > LOG
    python -m benchmarks.trainer.layouts --of LOG

Every layout trains on the same batch: eight sequences for each GPU, two a micro batch. Prints a JSON line for each, as
`gpu_step` does, with the parts of what is expected, and at the end the agreement of both orders; `--of` compares what
a run that was cut off has printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from benchmarks.trainer.gpu_step import job, measure_case, parsed_cases, parser
from benchmarks.trainer.in_turn import Line, in_turn
from moejob_api.hardware import job_hardware
from moejob_api.layout.sizes import derive_layout
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.planner.cost import step_cost

# By the GPUs that they divide: the options that all layouts have.
ALIKE = {2: "--layers 4 --micro 2 --gradients bfloat16", 4: "--layers 8 --micro 2 --gradients bfloat16"}
_CASE_SECONDS = 120
# One replica makes all micro batches, two or four make their share of them each.
LAYOUTS = {
    2: {
        "DP2": "--data 2 --accumulate 4",
        "DP2 ZeRO2": "--data 2 --accumulate 4 --sharding ZeRO2",
        "DP2 FSDP": "--data 2 --accumulate 4 --sharding FSDP",
        "EP2": "--expert 2 --accumulate 4",
        "TP2": "--tensor 2 --accumulate 8",
        "TP2, experts whole": "--tensor 2 --folded --accumulate 8",
        "TP2.EP2 folded": "--tensor 2 --expert 2 --folded --accumulate 8",
        "PP2": "--pipeline 2 --accumulate 8",
        "CP2": "--context 2 --accumulate 8",
        "CP2.EP2 folded": "--context 2 --expert 2 --folded --accumulate 8",
        "DP2 recompute Selective": "--data 2 --accumulate 4 --recompute Selective",
        "DP2 recompute Full": "--data 2 --accumulate 4 --recompute Full",
        "EP2 recompute Full": "--expert 2 --accumulate 4 --recompute Full",
    },
    4: {
        "EP4": "--expert 4 --accumulate 4",
        "DP4": "--data 4 --accumulate 4",
        "PP4": "--pipeline 4 --accumulate 16",
        "TP4": "--tensor 4 --accumulate 16",
        "EP2.DP2": "--expert 2 --data 2 --accumulate 4",
        "TP2.EP2": "--tensor 2 --expert 2 --accumulate 8",
        "PP2.EP2": "--pipeline 2 --expert 2 --accumulate 8",
        "CP2.EP2": "--context 2 --expert 2 --accumulate 8",
        "TP2.PP2": "--tensor 2 --pipeline 2 --accumulate 16",
        "DP4 FSDP": "--data 4 --accumulate 4 --sharding FSDP",
        "EP4 folded over TP2.DP2": "--tensor 2 --data 2 --expert 4 --folded --accumulate 8",
        "CP4": "--context 4 --accumulate 16",
        "EP4 recompute Full": "--expert 4 --accumulate 4 --recompute Full",
    },
}


@dataclass(frozen=True, slots=True)
class LayoutSeconds:
    """The seconds of a step on a layout, as they are expected and as they were measured."""

    name: str
    expected: float
    measured: float


def main() -> None:
    """Measure all layouts, and compare their orders."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--of", type=Path, metavar="LOG", help="compare the lines of this file; measure nothing")
    gpus = int(os.environ.get("WORLD_SIZE", "1"))
    asked.add_argument("--only", nargs="*", choices=LAYOUTS.get(gpus, ()), metavar="LAYOUT")
    asked.add_argument("--options", default="", help="of gpu_step, for all layouts")
    chosen = asked.parse_args()
    lines = _in(chosen.of) if chosen.of else _measure_layouts(gpus, chosen.only, chosen.options)
    if lines is not None:
        print(json.dumps({"order": compare_orders(list(_seconds(lines)))}), flush=True)


def compare_orders(of: Sequence[LayoutSeconds]) -> dict[str, object]:
    """Return the agreement of both orders: Kendall's tau, and every pair that is expected the wrong way round."""
    pairs = list(combinations(sorted(of, key=lambda one: one.measured), 2))
    swapped = [(fast, slow) for fast, slow in pairs if fast.expected > slow.expected]
    return {
        "measured": [one.name for one in sorted(of, key=lambda one: one.measured)],
        "expected": [one.name for one in sorted(of, key=lambda one: one.expected)],
        "tau": round(1 - 2 * len(swapped) / len(pairs), 3) if pairs else None,
        "swapped": [
            {
                "faster": fast.name,
                "slower": slow.name,
                "measuredRatio": round(slow.measured / fast.measured, 3),
                "expectedRatio": round(slow.expected / fast.expected, 3),
            }
            for fast, slow in swapped
        ],
        "measuredOverExpected": {one.name: round(one.measured / one.expected, 3) for one in of},
    }


def _measure_layouts(gpus: int, only: Sequence[str] | None, options: str) -> list[Line] | None:
    if gpus not in LAYOUTS:
        raise ValueError(f"there are layouts for {' and '.join(map(str, LAYOUTS))} GPUs, not {gpus}; start as many")
    names = only or list(LAYOUTS[gpus])
    around = parsed_cases([f"{ALIKE[gpus]} {options}"], parser().parse_args([]))[0]
    cases = parsed_cases([LAYOUTS[gpus][name] for name in names], around)

    def measure(number: int, device: torch.device) -> Line:
        chosen = cases[number]
        return {"layout": names[number], **measure_case(chosen, device), "expectedParts": _parts(chosen, device)}

    return in_turn(names, measure, _CASE_SECONDS)


def _parts(chosen: argparse.Namespace, device: torch.device) -> Mapping[str, float]:
    """Return the seconds that each part of a step is expected to take."""
    spec = job(chosen, device)
    config = dict(catalog.find_config(chosen.model) or {}) | {"num_hidden_layers": chosen.layers}
    sizes = derive_layout(spec.parallelism, spec.resources.gpus_per_node)
    cost = step_cost(spec, shape_of(config, chosen.model), sizes, job_hardware(spec.resources))
    return {part.name.value: round(part.seconds, 5) for part in cost.parts}


def _in(log: Path) -> list[Line]:
    texts = (line for line in log.read_text().splitlines() if line.startswith("{"))
    return [line for line in map(json.loads, texts) if "layout" in line]


def _seconds(lines: Sequence[Line]) -> Iterator[LayoutSeconds]:
    for line in lines:
        match line:
            case {"layout": str(name), "expectedSeconds": float(expected), "secondsPerStep": float(seconds)}:
                yield LayoutSeconds(name, expected, seconds)
            case _:
                print(f"not compared: {json.dumps(line)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
