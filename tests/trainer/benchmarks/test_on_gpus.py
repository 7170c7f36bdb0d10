"""The benches that the GPUs of a machine can run, and the page that is made of their lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from benchmarks import record
from benchmarks.trainer import recorded
from benchmarks.trainer.gpu_step import parsed_cases, parser
from benchmarks.trainer.on_gpus import BENCHES, Bench, fitting

USUAL = vars(parser().parse_args(["--micro", "4", "--gradients", "bfloat16"])) | {"attention": "flash-attn-4"}


@pytest.mark.parametrize(
    "bench", [bench for bench in BENCHES if bench.module == "gpu_step"], ids=lambda bench: bench.name
)
def test_every_case_of_a_bench_is_one_that_its_gpus_can_divide(bench: Bench) -> None:
    cases = parsed_cases([option.removeprefix("--case=") for option in bench.options], parser().parse_args([]))
    assert len(cases) == len(bench.options)
    for case in cases:
        assert case.tensor * case.pipeline * case.context * case.data * case.expert == bench.gpus


def test_what_needs_more_gpus_is_left_out_by_name() -> None:
    runs, absent = fitting(BENCHES, 2)
    assert {bench.gpus for bench in runs} == {1, 2}
    assert [bench.name for bench in absent] == ["layouts of four GPUs", "four GPUs", "longest"]


def test_several_gpus_are_ranks_of_one_launch() -> None:
    alone, both = Bench("a", 1, "peers").command(), Bench("b", 2, "exchange", ("--tokens", "8")).command()
    assert alone[1:] == ["-m", "benchmarks.trainer.peers"]
    assert both[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert both[-4:] == ["-m", "benchmarks.trainer.exchange", "--tokens", "8"]


def test_a_peer_stands_beside_what_was_measured_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = rows(tmp_path, monkeypatch, line("NVIDIA H200"), peer(), compared())
    case = "Qwen3-30B-A3B, 8 layers, 4x4, gradients in bfloat16, flash-attn-4"
    assert page[f"{case}: speed"][0] == "80,000 tokens/s/GPU"
    assert page[f"{case}: step beside a peer"][:2] == ["80,000 tokens/s/GPU", "40,000 tokens/s/GPU (0.5x)"]
    assert len(page) == 4


def test_another_kind_of_gpu_has_rows_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = rows(tmp_path, monkeypatch, line("NVIDIA H200"), line("NVIDIA H100 80GB HBM3"))
    assert sum(case.endswith(", H100: speed") for case in page) == 1
    assert len(page) == 6


def test_lines_of_other_benches_are_not_taken_for_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = {"case": {"tokens": 16384, "gpus": 2}, "milliseconds": {"barrier": 0.006}, "device": "NVIDIA H200"}
    assert len(rows(tmp_path, monkeypatch, exchange, line("NVIDIA H200"))) == 3
    assert not rows(tmp_path, monkeypatch, exchange)


def rows(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: Mapping[str, object]) -> dict[str, list[str]]:
    """Record these lines of a log into a page of their own; its cells by case."""
    for module in (record, recorded):
        monkeypatch.setattr(module, "RESULTS", folder)
    monkeypatch.setattr(record, "FOLDER", folder)
    page, log = folder / "training-gpu.md", folder / "log"
    page.write_text(f"{record.START}{record.END}")
    log.write_text("\n".join(json.dumps(one) for one in lines))
    recorded.main([str(log)])
    cells = [row.strip("| ").split("|") for row in page.read_text().splitlines() if row.startswith("| Qwen")]
    return {case.strip(): [cell.strip() for cell in rest] for case, *rest in cells}


def line(device: str) -> dict[str, object]:
    speeds = {"tokensPerSecondPerGpu": 80_000, "teraflops": 430.0, "peakGiB": 90.0}
    return {"case": USUAL, **speeds, "torch": "2.13.0", "device": device}


def peer() -> dict[str, object]:
    return line("NVIDIA H200") | {"peer": "Transformers", "tokensPerSecondPerGpu": 40_000}


def compared() -> dict[str, object]:
    return peer() | {"compared": "step", "tokensPerSecondPerGpu": 80_000, "peerSpeed": 40_000}
