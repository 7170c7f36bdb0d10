"""The command line of an engine follows from its job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moejob_api.contract.pods import PodRole
from moejob_api.job import Spec
from moejob_rollout.arguments import server_arguments, thread_variables, vllm_variables
from moejob_rollout.engine import EngineEnvironment

CONFIG = {"max_position_embeddings": 4096}


def make_engine(accelerator: str, *, replays: bool = False, **rollout: Any) -> EngineEnvironment:
    grpo = {"groupSize": 8, "promptsPerStep": 1, "rewards": [{"name": "exact-match"}], "routingReplay": replays}
    spec = {
        "method": "GRPO",
        "model": {"source": "/model"},
        "data": {"train": [{"source": "/prompts.jsonl", "format": "Prompts"}]},
        "training": {"maxSteps": 1, "globalBatchSize": 8},
        "grpo": grpo | {"rollout": rollout},
        "storage": {"size": "1Gi"},
        "resources": {"accelerator": accelerator},
    }
    return EngineEnvironment(
        spec=Spec.model_validate_json(json.dumps(spec)),
        role=PodRole.ROLLOUT,
        index=0,
        host="127.0.0.1",
        run_folder=Path("/run"),
        rollout_urls=("http://127.0.0.1:8000",),
    )


def options(accelerator: str, *, replays: bool = False, **rollout: Any) -> dict[str, str]:
    """The options of an engine on this accelerator; one without a value has an empty one."""
    lines = server_arguments(make_engine(accelerator, replays=replays, **rollout), Path("/model"), CONFIG)
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_an_engine_on_a_gpu_replays_graphs_of_decoding_and_compiles_nothing() -> None:
    found = options("GPU")
    assert "--enforce-eager" not in found
    assert json.loads(found["--compilation-config"]) == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def test_an_engine_on_a_cpu_has_no_graphs() -> None:
    found = options("CPU")
    assert "--enforce-eager" in found
    assert "--compilation-config" not in found


@pytest.mark.parametrize(("tensor", "is_alone"), [(1, True), (2, False)])
def test_the_only_worker_on_a_cpu_is_no_process_of_its_own(tensor: int, is_alone: bool) -> None:
    assert options("CPU", tensor=tensor).get("--distributed-executor-backend", "mp").endswith("Executor") is is_alone
    assert "--distributed-executor-backend" not in options("GPU", tensor=tensor)


@pytest.mark.parametrize(
    ("tensor", "bound"),
    [
        (1, {"OMP_NUM_THREADS": "3", "OMP_PLACES": "{0,2,5}", "OMP_PROC_BIND": "true"}),
        (2, {"VLLM_CPU_OMP_THREADS_BIND": "0|2"}),
        (4, {"VLLM_CPU_OMP_THREADS_BIND": "0|2|5|5"}),
    ],
)
def test_each_worker_on_a_cpu_has_cores_of_its_own_as_far_as_there_are(tensor: int, bound: dict[str, str]) -> None:
    assert thread_variables((0, 2, 5), tensor) == bound


@pytest.mark.parametrize(("placement", "sleeps"), [("Colocated", True), ("Separate", False)])
def test_an_engine_sleeps_where_it_shares_the_gpus_of_a_trainer(placement: str, sleeps: bool) -> None:
    assert ("--enable-sleep-mode" in options("GPU", placement=placement)) is sleeps


@pytest.mark.parametrize("accelerator", ["CPU", "GPU"])
@pytest.mark.parametrize("replays", [True, False])
def test_an_engine_returns_experts_where_the_trainer_replays_them(accelerator: str, replays: bool) -> None:
    found = options(accelerator, replays=replays)
    assert ("--enable-return-routed-experts" in found) is replays
    # Where vLLM keeps them, beside the cache of keys and values.
    assert "--enable-prefix-caching" in found


@pytest.mark.parametrize("accelerator", ["CPU", "GPU"])
def test_a_probe_can_come_before_answers(accelerator: str) -> None:
    assert options(accelerator)["--scheduling-policy"] == "priority"


@pytest.mark.parametrize(
    ("accelerator", "environ", "spins"),
    [("CPU", {}, "1000"), ("CPU", {"OMP_WAIT_POLICY": "ACTIVE"}, None), ("GPU", {}, None)],
)
def test_threads_of_engines_on_cpus_soon_give_up_their_cores(
    accelerator: str, environ: dict[str, str], spins: str | None
) -> None:
    assert vllm_variables(make_engine(accelerator), (0, 1), environ).get("GOMP_SPINCOUNT") == spins
