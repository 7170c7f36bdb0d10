"""`moejob run` with the real trainer: a rank that is killed in the middle changes nothing of what is learned."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from listening import Listening, watch_process
from trainer.held_out_loss import held_out_loss

ROOT = Path(__file__).parents[2]
# The command line must never meet torch: it has an environment of its own.
COMMAND = ROOT / ".venv/operator/bin/moejob"
STEPS = 8
LONGEST_SECONDS = 240.0
_STARTED = re.compile(r"ranks started ranks=\[0, 1\] pids=\[\d+, (\d+)\]")


@dataclass
class TinyRun:
    """One `moejob run` of the shortened example."""

    place: Path
    process: subprocess.Popen[str]
    listening: Listening = field(default_factory=Listening)

    def lines(self) -> list[dict[str, Any]]:
        log = self.place / "steps.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def losses(self) -> dict[int, float]:
        """The loss of every step, as it was done last."""
        return {line["step"]: line["loss"] for line in self.lines()}

    def second_rank(self) -> int:
        found = _STARTED.search((self.place / "logs" / "pod-0.log").read_text())
        assert found is not None
        return int(found[1])

    def ended(self) -> str:
        said, _ = self.process.communicate(timeout=LONGEST_SECONDS)
        assert self.process.returncode == 0, said
        return said


def started(folder: Path, name: str, **sections: Any) -> TinyRun:
    job = yaml.safe_load((ROOT / "examples" / "tiny-sft.yaml").read_text())
    sets = [{"source": "moejob/tiny-chats", "format": "Chat", "split": split} for split in ("test", "train")]
    job["spec"]["data"] |= {"maxLength": 64, "eval": sets}
    job["spec"]["training"] |= {"maxSteps": STEPS, "evalEvery": STEPS}
    # In the background a save may take longer than the steps that are left.
    job["spec"]["checkpoint"] |= {"everySteps": 2, "async": False}
    job["spec"] |= sections
    return _started(folder, name, job)


def _started(folder: Path, name: str, job: dict[str, Any]) -> TinyRun:
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(job))
    process = subprocess.Popen(
        [COMMAND, "run", file, "--run-dir", folder / name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _interface()),
    )
    return TinyRun(folder / name, process)


@contextmanager
def ended_by_force(*runs: TinyRun) -> Iterator[None]:
    """Leave no process behind, however the block ends."""
    try:
        yield
    finally:
        for run in runs:
            run.process.terminate()
            run.process.wait()


def _interface() -> str:
    """The interface by which this machine reaches others, as a shell names it that is meant for a cluster."""
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    return routes[0].split()[0] if routes else "eth0"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyRun, TinyRun]]:
    """One run that nothing happens to, and one whose second rank is killed after a few steps; both to their ends."""
    folder = tmp_path_factory.mktemp("runs")
    calm, killed = started(folder, "calm"), started(folder, "killed")
    with ended_by_force(calm, killed):
        with watch_process(killed.process.pid) as killed.listening:
            until = time.monotonic() + LONGEST_SECONDS
            while len(killed.lines()) < 3 and time.monotonic() < until and killed.process.poll() is None:
                time.sleep(0.01)
            os.kill(killed.second_rank(), signal.SIGKILL)
            assert "its ranks were restarted in place" in killed.ended()
        calm.ended()
        yield calm, killed


@pytest.mark.slow
def test_no_process_of_a_run_can_be_reached_from_other_machines(runs: tuple[TinyRun, TinyRun]) -> None:
    seen = runs[1].listening
    assert seen.places[runs[1].second_rank()], "ranks listen for one another"
    assert seen.reachable == set()


@pytest.mark.slow
@pytest.mark.thorough
def test_no_engine_of_a_run_can_be_reached_from_other_machines(tmp_path: Path) -> None:
    job = yaml.safe_load((ROOT / "examples" / "tiny-grpo.yaml").read_text())
    job["spec"]["model"]["source"] = "moejob/tiny-moe"
    job["spec"]["training"] = {"maxSteps": 2}
    job["spec"]["parallelism"], job["spec"]["resources"]["gpusPerNode"] = {"data": 2}, 2
    # Rank 0 and the engine's workers are a process group, as they are not with Disk.
    job["spec"]["grpo"] |= {"rollout": {"placement": "Separate", "sync": "Gloo", "tensor": 2}, "temperature": 0.9}
    run = _started(tmp_path, "reinforced", job)
    with ended_by_force(run), watch_process(run.process.pid) as run.listening:
        run.ended()
    assert len(run.listening.places) > 2, "the trainer, the engine and its workers listen"
    assert run.listening.reachable == set()


@pytest.mark.slow
def test_a_killed_rank_changes_no_loss(runs: tuple[TinyRun, TinyRun]) -> None:
    calm, killed = runs
    assert list(calm.losses()) == list(range(1, STEPS + 1))
    assert killed.losses() == pytest.approx(calm.losses(), rel=1e-6)
    assert calm.losses()[STEPS] < calm.losses()[1]


@pytest.mark.slow
def test_a_killed_rank_goes_on_from_a_checkpoint(runs: tuple[TinyRun, TinyRun]) -> None:
    again = [line["step"] for line in runs[1].lines() if line["restart"] == 1]
    assert again[0] > 1
    assert again[-1] == STEPS


@pytest.mark.slow
def test_both_exports_are_the_same_model_and_transformers_loads_it(runs: tuple[TinyRun, TinyRun]) -> None:
    models: list[Any] = []
    for run in runs:
        loaded: Any = AutoModelForCausalLM.from_pretrained(run.place / "export", output_loading_info=True)
        model, loading = loaded
        assert not loading["missing_keys"]
        assert not loading["unexpected_keys"]
        models.append(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(runs[1].place / "export")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what colour is the sky?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    calm, killed = (model(asked).logits for model in models)
    torch.testing.assert_close(killed, calm, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_each_evaluation_set_has_the_loss_and_perplexity_that_transformers_computes(
    runs: tuple[TinyRun, TinyRun],
) -> None:
    run = runs[0]
    line, expected = run.lines()[-1], []
    for report in (run.place / "data").glob("*/report.json"):
        counts = json.loads(report.read_text())
        name = {"train": "tiny-chats", "test": "tiny-chats-test"}[counts["split"]]
        loss = held_out_loss(run.place / "export", report.parent)
        assert line[f"evalLoss/{name}"] == pytest.approx(loss, rel=1e-5)
        assert line[f"evalPerplexity/{name}"] == pytest.approx(math.exp(loss), rel=1e-4)
        expected.append((loss, counts["trained_tokens"]))
    assert len(expected) == 2
    whole = sum(loss * count for loss, count in expected) / sum(count for _, count in expected)
    assert line["evalLoss"] == pytest.approx(whole, rel=1e-5)
    assert line["evalPerplexity"] == pytest.approx(math.exp(whole), rel=1e-4)


# Parity of such layouts, their checkpoints and exports have tests that start no command.
@pytest.mark.thorough
@pytest.mark.slow
def test_replicas_that_divide_everything_learn_and_export_the_same(
    runs: tuple[TinyRun, TinyRun], tmp_path: Path
) -> None:
    calm, shares = runs[0], started(tmp_path, "shares", parallelism={"data": 2}, memory={"sharding": "FSDP"})
    with ended_by_force(shares):
        shares.ended()
    assert shares.losses() == pytest.approx(calm.losses(), rel=1e-4)
    model, expected = (_exported(run) for run in (shares, calm))
    assert model.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-3, atol=1e-4)


def _exported(run: TinyRun) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(run.place / "export", dtype=torch.float32)
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights
