"""Run folders for tests of the page, as runs leave them."""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Iterator
from math import exp, sin
from pathlib import Path
from typing import Any

from builders import spec
from moejob_api.contract.record import RecordEvent, RunEventKind, attempt_folder_name, pod_record_name, record_line

BEGAN = 1_790_000_000.0
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\x1b[2J\u202e&lt;"
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "rank.py", line 7, in step',
    "ValueError: loss is not finite",
)


def step_line(step: int, time: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": round(step / 500, 6),
        "seconds": 1.5,
        "time": round(time, 3),
        "attempt": 1,
        "restart": 0,
        "dataWaitSeconds": 0.25,
        "checkpointStallSeconds": 0.0,
        "loss": 2.2 * exp(-step / 120) + 0.9 + 0.06 * sin(step * 1.7),
        "gradNorm": 1.4 + 0.5 * sin(step * 0.9),
        "learningRate": 3e-4 * min(1.0, step / 40),
        "applied": True,
        "tokens": 65_536,
        "tokensPerSecond": 43_690.7 + 900 * sin(step * 2.3),
        "tokensPerSecondPerGpu": 5_461.3 + 110 * sin(step * 2.3),
        "peakMemoryBytes": 61_203_283_968.0,
        "routerEntropy": 3.9 - 0.2 * exp(-step / 60),
        "expertImbalance": 1.2 + exp(-step / 50) + 0.05 * sin(step),
        "worstExpertImbalance": 1.9 + 2 * exp(-step / 50) + 0.2 * sin(step),
        "worstExpertLayer": step % 24,
        "idleExperts": max(0, 12 - step // 20),
        "balancingLoss": 0.0112,
    } | more


def failed_steps(count: int) -> Iterator[dict[str, Any]]:
    """Yield a run that fails at its 37th step of 60 and does the steps behind 30 again."""
    time = BEGAN + 40
    for step in range(1, min(37, count) + 1):
        time += 1.5
        yield step_line(step, time)
    time += 30
    for step in range(31, count + 1):
        evaluated = {"evalLoss": 1.1 + exp(-step / 80), "evaluateSeconds": 2.0} if step % 20 == 0 else {}
        time += 1.5 + evaluated.get("evaluateSeconds", 0.0)
        stall = 0.4 if step >= 60 else 0.0
        yield step_line(step, time, restart=1, checkpointStallSeconds=stall, **evaluated)


def make_run(folder: Path, count: int = 200, name: str = "qwen3-sft", **sections: Any) -> Path:
    """A run with a failure at step 37."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"job": name, "uid": "1234"}))
    layout = {"parallelism": {"tensor": 2, "data": 4, "expert": 4}, "resources": {"gpusPerNode": 4}}
    (folder / "spec.json").write_text(spec(**(layout | sections)).model_dump_json(by_alias=True, exclude_none=True))
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in failed_steps(count)))
    _write_record(folder, count)
    (folder / "experts.jsonl").write_text("".join(map(experts_line, range(1, count + 1, 2))))
    samples = folder / "samples"
    samples.mkdir()
    for step in (10, 20, 37):
        (samples / f"step-{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sample_rows(step)))
    return folder


def experts_line(step: int) -> str:
    """Return the load of 6 layers of 32 experts; the last layer collapses."""
    counts = [
        int(400 * (1 + sin(expert * 5.1 + layer * 3) * exp(-step / 90))) if layer < 5 or expert < 4 or step < 120 else 0
        for layer in range(6)
        for expert in range(32)
    ]
    choices = base64.b64encode(zlib.compress(array("I", counts).tobytes())).decode()
    fields = {"step": step, "attempt": 1, "restart": 0, "layers": [1, 2, 3, 4, 5, 6], "experts": 32}
    return json.dumps(fields | {"choices": choices}) + "\n"


def sample_rows(step: int) -> Iterator[dict[str, Any]]:
    for member in range(6):
        reward = (member + step) % 3 / 2
        yield {
            "step": step,
            "group": step * 4 + member // 3,
            "member": member % 3,
            "prompt": f"Ada has {step} apples and gives {member} away. How many are left?",
            "answer": f"Ada had {step} apples.\nShe gives {member} away: {step} - {member} = {step - member}.",
            "finishReason": "stop",
            "reward": reward,
            "rewards": {"math": reward, "format": 1.0},
            "advantage": round(reward - 0.5, 3),
            "version": step - 1,
        }


def _write_record(folder: Path, count: int) -> None:
    for pod in (0, 1):
        path = folder / "record" / attempt_folder_name(1) / pod_record_name(pod)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(map(record_line, _events(pod, count))))


def _events(pod: int, count: int) -> Iterator[RecordEvent]:
    failed_at = BEGAN + 40 + 37 * 1.5 + 0.5
    ranks = tuple(range(pod * 4, pod * 4 + 4))

    def event(time: float, kind: RunEventKind, **fields: Any) -> RecordEvent:
        return RecordEvent(time=round(time, 3), kind=kind, pod=pod, **fields)

    yield event(BEGAN, RunEventKind.LAUNCHER_STARTED, node=f"gpu-node-{pod + 3}", host=f"qwen3-sft-{pod}", ranks=ranks)
    yield event(
        BEGAN + 12, RunEventKind.RANKS_STARTED, restart=0, seconds={"import_seconds": 9.1, "rendezvous_seconds": 2.9}
    )
    if pod == 0:
        yield event(BEGAN + 14, RunEventKind.PHASE, restart=0, state="loading and checking weights")
        yield event(BEGAN + 42, RunEventKind.PHASE, restart=0, state="stepping")
    failure = {
        "message": "rank 5 ended with exit code 1: ValueError: loss is not finite",
        "state": "RankFailed",
        "rank": 5,
    }
    kind = RunEventKind.RANKS_FAILED if pod == 1 else RunEventKind.ROUND_ENDED
    yield event(failed_at, kind, restart=0, step=37, exit_code=1, **failure)
    if pod == 1:
        yield event(failed_at + 0.1, RunEventKind.LAST_LINES, restart=0, rank=5, lines=(HOSTILE, *TRACEBACK))
    yield event(
        failed_at + 1, RunEventKind.RESTARTING, restart=0, message="restart in place 1 since the last new checkpoint"
    )
    yield event(
        failed_at + 9, RunEventKind.RANKS_STARTED, restart=1, seconds={"ending_seconds": 6.0, "rendezvous_seconds": 2.0}
    )
    if pod == 0:
        last = [*failed_steps(count)][-1]["time"]
        yield event(last + 1, RunEventKind.PHASE, restart=1, state="exporting and checking the export")
        yield event(
            last + 15,
            RunEventKind.LAUNCHER_ENDED,
            restart=1,
            state="Completed",
            exit_code=0,
            message="all ranks are done",
        )


def write_long_run(folder: Path, count: int) -> Path:
    """Write a run of many steps, of 620 bytes each."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"job": "long", "uid": "1"}))
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(1, count + 1):
            line = step_line(step, BEGAN + 1.5 * step, expertBias=0.001 * step)
            text = json.dumps(line)
            file.write(text[:-1] + ', "tag": "' + "x" * max(0, 608 - len(text)) + '"}\n')
    return folder
