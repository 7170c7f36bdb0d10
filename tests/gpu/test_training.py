"""The tiny model trains on a GPU as it does on the CPU, through the same code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

PROGRAM = Path(__file__).with_name("training.py")
FLOAT8 = {"compute": "FP8"}
# The tiny model with linear attention in every other layer, and without experts, whose ties rounding would decide.
LINEAR = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "mlp_only_layers": [0, 1, 2, 3],
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def has_float8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@cache
def trained(
    device: str,
    dtype: str,
    memory: str = "{}",
    precision: str = "{}",
    implementation: str = "Native",
    changes: str = "{}",
) -> dict[str, list[float]]:
    command = [sys.executable, str(PROGRAM), device, dtype, memory, precision, implementation, changes]
    # A thread for each of many cores only waits for the others, and tests beside one another have as many each.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def of_one_cpu(changes: str = "{}") -> dict[str, list[float]]:
    """Return the reference of all here. Where rounding decides between two experts, two runs are of two models."""
    found = trained("cpu", "float32", changes=changes)
    assert min(found["distances"], default=1.0) > 1e-5, (
        "a token is near a tie of two experts: choose another SEED in training.py"
    )
    return found


@pytest.mark.parametrize(
    ("dtype", "within"),
    [
        pytest.param("float32", 2e-4, id="float32"),
        # Routing flips where two experts are nearly alike: a few tokens go elsewhere.
        pytest.param("bfloat16", 2e-2, id="bfloat16"),
    ],
)
def test_a_gpu_trains_what_the_cpu_trains(dtype: str, within: float) -> None:
    here, reference = trained("cuda", dtype), of_one_cpu()
    assert here["losses"] == pytest.approx(reference["losses"], rel=within)
    assert here["norms"] == pytest.approx(reference["norms"], rel=10 * within)
    assert reference["losses"][-1] < reference["losses"][0] - 0.3, "the reference itself does not learn"


@pytest.mark.parametrize(("dtype", "within"), [("float32", 2e-4), ("bfloat16", 2e-2)])
def test_a_gpu_trains_linear_attention_as_the_cpu_does(dtype: str, within: float) -> None:
    """In bfloat16 by flash-linear-attention, where it is installed."""
    changes = json.dumps(LINEAR)
    here, reference = trained("cuda", dtype, changes=changes), of_one_cpu(changes)
    assert here["losses"] == pytest.approx(reference["losses"], rel=within)
    assert here["norms"] == pytest.approx(reference["norms"], rel=10 * within)
    assert reference["losses"][-1] < reference["losses"][0] - 0.3, "the reference itself does not learn"


@pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge")
@pytest.mark.parametrize(("dtype", "within"), [("float32", 2e-4), ("bfloat16", 2e-2)])
def test_megatrons_own_model_trains_on_a_gpu_what_ours_trains_on_the_cpu(dtype: str, within: float) -> None:
    here, reference = trained("cuda", dtype, implementation="Megatron"), of_one_cpu()
    assert here["losses"] == pytest.approx(reference["losses"], rel=within)
    assert here["norms"] == pytest.approx(reference["norms"], rel=10 * within)


@pytest.mark.skipif(not has_float8(), reason="needs a GPU that multiplies FP8 numbers")
def test_a_gpu_trains_in_fp8_what_the_cpu_trains_in_it() -> None:
    here, reference = (trained(device, "bfloat16", precision=json.dumps(FLOAT8)) for device in ("cuda", "cpu"))
    assert here["losses"] == pytest.approx(reference["losses"], rel=2e-2)
    assert here["norms"] == pytest.approx(reference["norms"], rel=2e-1)
    assert here["losses"] != pytest.approx(trained("cuda", "bfloat16")["losses"], rel=1e-4), "nothing is rounded"
    assert reference["losses"][-1] < reference["losses"][0] - 0.3, "the reference itself does not learn"


@pytest.mark.parametrize(
    "memory",
    [{"offloadOptimizer": 0.5}, {"offloadOptimizer": 1.0}, {"offloadActivations": True}],
    ids=json.dumps,
)
def test_what_saves_memory_on_a_gpu_changes_nothing(memory: dict[str, object]) -> None:
    saving, reference = trained("cuda", "float32", json.dumps(memory)), trained("cuda", "float32")
    assert saving["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert saving["norms"] == pytest.approx(reference["norms"], rel=1e-4)


LAYOUTS: dict[str, dict[str, object]] = {
    "TP2.EP2": {"tensor": 2, "expert": 2},
    "PP2.EP2": {"pipeline": 2, "expert": 2},
    "CP2.DP2": {"context": 2, "data": 2},
    "EP4 folded over TP2.DP2": {"tensor": 2, "data": 2, "expert": 4, "expertLayout": "Folded"},
    "PP2.VPP2.DP2": {"pipeline": 2, "virtualPipeline": 2, "data": 2},
}


# With two replicas gradients are summed and weights gathered beside the computation.
OVER_TWO: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "DP2": ({"data": 2}, {}),
    "EP2": ({"expert": 2}, {}),
    "TP2": ({"tensor": 2}, {}),
    "PP2": ({"pipeline": 2}, {}),
    "CP2": ({"context": 2}, {}),
    "DP2, optimizer offloaded": ({"data": 2}, {"offloadOptimizer": 1.0}),
    "DP2, ZeRO-2": ({"data": 2}, {"sharding": "ZeRO2"}),
    "DP2, FSDP": ({"data": 2}, {"sharding": "FSDP"}),
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", OVER_TWO)
def test_a_layout_over_two_gpus_trains_what_one_cpu_trains(layout: str) -> None:
    _trains_what_one_cpu_trains(*OVER_TWO[layout], ranks=2)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_over_four_gpus_trains_what_one_cpu_trains(layout: str) -> None:
    _trains_what_one_cpu_trains(LAYOUTS[layout], {})


SHARES: dict[str, dict[str, object]] = {
    "DP4": {"data": 4},
    "EP2.DP2": {"expert": 2, "data": 2},
    "EP4": {"expert": 4},
    "TP2.DP2": {"tensor": 2, "data": 2},
}


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("layout", SHARES)
def test_fsdp_over_four_gpus_trains_what_one_cpu_trains(layout: str) -> None:
    _trains_what_one_cpu_trains(SHARES[layout], {"sharding": "FSDP"})


# Experts divided over a node; recomputed layers exchange their tokens twice.
WRITING: dict[str, dict[str, object]] = {
    "EP2": {"expert": 2},
    "EP4": {"expert": 4},
    "PP2.VPP2.EP2": {"pipeline": 2, "virtualPipeline": 2, "expert": 2},
    "TP2.EP2.ETP2 folded over TP2.DP2": {
        "tensor": 2,
        "data": 2,
        "expert": 2,
        "expertTensor": 2,
        "expertLayout": "Folded",
    },
}


@pytest.mark.parametrize("layout", WRITING)
def test_writing_tokens_to_other_gpus_trains_what_exchanging_them_trains(layout: str) -> None:
    ranks = 2 if layout == "EP2" else 4
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    written, exchanged = (
        _started("layouts.py", ranks, json.dumps(WRITING[layout]), "{}", json.dumps({"dispatcher": dispatcher}))
        for dispatcher in ("Flex", "AllToAll")
    )
    assert "becomes AllToAll" not in written.stderr
    here, reference = (json.loads(done.stdout.splitlines()[-1]) for done in (written, exchanged))
    assert here["losses"] == pytest.approx(reference["losses"], rel=1e-6)
    assert here["norms"] == pytest.approx(reference["norms"], rel=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_through_the_memory_of_two_gpus_are_those_of_an_all_to_all_and_of_cpus() -> None:
    for of_rank in json.loads(_started("exchanges.py", 2).stdout.splitlines()[-1]):
        for name, (through_memory, *distances) in of_rank.items():
            assert through_memory == (1 if name == "one layer does not fit" else 2), name
            # Output, and gradients of tokens and of probabilities, beside the all-to-all; then beside CPUs, where the
            # products of a probability's gradient are added in another order.
            assert distances[:5] == [0.0] * 5, name
            assert distances[5] < 1e-4 if "model" not in name else distances[5] < 1.0, name


# The parallelism, and other sections: every way to a product of FP8 numbers.
FLOAT8_OVER_TWO: dict[str, tuple[dict[str, object], dict[str, object], dict[str, object]]] = {
    "TP2": ({"tensor": 2}, {}, {}),
    "EP2, tokens written to peers": ({"expert": 2}, {}, {"dispatcher": "Flex"}),
    "DP2": ({"data": 2}, {}, {}),
    "DP2, FSDP": ({"data": 2}, {"sharding": "FSDP"}, {}),
}


@pytest.mark.skipif(torch.cuda.device_count() < 2 or not has_float8(), reason="needs two GPUs that multiply FP8")
@pytest.mark.parametrize("layout", FLOAT8_OVER_TWO)
def test_a_layout_over_two_gpus_trains_in_fp8_what_one_cpu_trains_in_it(layout: str) -> None:
    done = _started("layouts.py", 2, *map(json.dumps, (*FLOAT8_OVER_TWO[layout], FLOAT8)))
    here = json.loads(done.stdout.splitlines()[-1])
    reference = trained("cpu", "bfloat16", precision=json.dumps(FLOAT8))
    assert here["losses"] == pytest.approx(reference["losses"], rel=2e-2)
    assert here["norms"] == pytest.approx(reference["norms"], rel=2e-1)


def _trains_what_one_cpu_trains(parallelism: dict[str, object], memory: dict[str, object], ranks: int = 4) -> None:
    done = _started("layouts.py", ranks, json.dumps(parallelism), json.dumps(memory))
    here, reference = json.loads(done.stdout.splitlines()[-1]), of_one_cpu()
    assert here["losses"] == pytest.approx(reference["losses"], rel=2e-4)
    assert here["norms"] == pytest.approx(reference["norms"], rel=2e-3)


def _started(program: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = str(PROGRAM.with_name(program))
    done = subprocess.run([*command, path, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
