"""Every benchmark of training that the GPUs of this machine can run, one after the other, into one log and the page.

    python -m benchmarks.trainer.on_gpus --log LOG [--only peers saves ...] [--folder FOLDER]

Benchmarks for more GPUs than there are here are left out, by name. One that fails or takes too long does not keep the
next ones from running.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.trainer import recorded

_BFLOAT16 = "--gradients bfloat16"
_MIXTRAL = "--model mistralai/Mixtral-8x7B-v0.1 --layers 2"
# A step of each of these is seconds; what takes long is the first of each shape.
_LONGEST_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Bench:
    """A module of this folder with its options, on as many GPUs."""

    name: str
    gpus: int
    module: str
    options: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return what runs it. Ranks that wait for one that failed are started again, behind its case."""
        module = ("-m", f"benchmarks.trainer.{self.module}")
        if self.gpus == 1:
            return [sys.executable, *module, *self.options]
        ranks = ("-m", "torch.distributed.run", "--nproc-per-node", str(self.gpus), "--max-restarts", "15")
        return [sys.executable, *ranks, *module, *self.options]


def _steps(name: str, gpus: int, *cases: str) -> Bench:
    return Bench(name, gpus, "gpu_step", tuple(f"--case={case}" for case in cases))


BENCHES = (
    _steps(
        "steps",
        1,
        f"--micro 4 {_BFLOAT16}",
        f"--micro 2 {_BFLOAT16}",
        "--micro 4 --layers 6",
        f"--micro 4 {_BFLOAT16} --recompute Selective --modules ExpertInput",
        f"--micro 4 {_BFLOAT16} --moments bfloat16 --recompute Selective",
        f"--micro 4 --accumulate 8 {_BFLOAT16} --uneven --length 1024 --per-row 4",
        f"--micro 4 {_BFLOAT16} {_MIXTRAL}",
        f"--micro 4 {_BFLOAT16} --layers 3 --offload 1",
    ),
    _steps("long", 1, f"--micro 1 {_BFLOAT16} --length 32768 --activations"),
    Bench("peers", 1, "peers", ("--micro", "4", *_BFLOAT16.split())),
    Bench("tiles", 1, "tiles"),
    Bench("saves", 1, "saves", ("--accumulate", "4")),
    _steps(
        "replicas",
        2,
        f"--data 2 --micro 4 {_BFLOAT16}",
        f"--data 2 --micro 4 {_BFLOAT16} --sharding ZeRO2",
        f"--data 2 --micro 4 {_BFLOAT16} --sharding FSDP",
    ),
    _steps(
        "dispatchers",
        2,
        *(f"--expert 2 --micro 4 --accumulate 2 {_BFLOAT16}{way}" for way in ("", " --dispatcher Flex")),
    ),
    Bench("exchange", 2, "exchange"),
    Bench("layouts", 2, "layouts"),
    Bench("layouts of four GPUs", 4, "layouts"),
    Bench("curves", 2, "loss_curves", ("--sharding", "DistributedOptimizer", "FSDP", "DistributedOptimizer")),
    _steps(
        "four GPUs",
        4,
        *(
            f"{sizes} {_BFLOAT16}{way}"
            for sizes in (
                "--expert 4 --layers 24 --micro 4 --accumulate 2",
                "--pipeline 2 --expert 2 --layers 16 --micro 2 --accumulate 8",
                "--tensor 2 --expert 2 --layers 12 --micro 4 --accumulate 2",
            )
            for way in ("", " --dispatcher Flex")
        ),
        f"--expert 4 --layers 24 --micro 4 --accumulate 2 {_BFLOAT16} --balanced",
    ),
    _steps("longest", 4, f"--context 4 --micro 1 --accumulate 1 {_BFLOAT16} --length 131072 --activations"),
)


def main() -> int:
    """Run them; the number of those that failed."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--log", type=Path, required=True, help="file for what they print; it is emptied first")
    asked.add_argument("--only", nargs="+", choices=[bench.name for bench in BENCHES], metavar="NAME", default=[])
    asked.add_argument("--folder", type=Path, help="on the disk that saves are measured on")
    chosen = asked.parse_args()
    chosen.log.parent.mkdir(parents=True, exist_ok=True)
    chosen.log.write_text("")
    runs, absent = fitting([bench for bench in BENCHES if not chosen.only or bench.name in chosen.only], gpus_here())
    for bench in absent:
        _say(f"== {bench.name}: needs {bench.gpus} GPUs, here are {gpus_here()}")
    if not runs:
        return 1
    failed = [bench.name for bench in runs if not _ran(bench, chosen)]
    recorded.main([str(chosen.log)])
    _say(f"failed: {', '.join(failed)}" if failed else "all ran")
    return len(failed)


def gpus_here() -> int:
    """Return how many GPUs this machine has."""
    return torch.cuda.device_count()


def fitting(benches: Sequence[Bench], gpus: int) -> tuple[list[Bench], list[Bench]]:
    """Return those for at most as many GPUs, and the others."""
    runs = [bench for bench in benches if bench.gpus <= gpus]
    return runs, [bench for bench in benches if bench.gpus > gpus]


def _ran(bench: Bench, chosen: argparse.Namespace) -> bool:
    folder = ("--folder", str(chosen.folder)) if bench.module == "saves" and chosen.folder else ()
    _say(f"== {bench.name}")
    with chosen.log.open("a") as log:
        process = subprocess.Popen([*bench.command(), *folder], stdout=log, start_new_session=True)
        try:
            code = process.wait(_LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            # Its ranks too, or the next one finds their memory taken.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _say(f"== {bench.name}: not done in {_LONGEST_SECONDS} s")
            return False
    _say(f"== {bench.name}: exit {code}")
    return code == 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
