"""Megatron's own model over two nodes: a pod that is lost, and the checkpoint of one job as the model of the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import merge_sections
from cluster.nodes.cluster import Cluster
from cluster.nodes.faults import kill_pod
from cluster.nodes.training import TRAINING_SECONDS, Job, over_two_nodes, read_example, run_here, submit_job
from cluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("home")]

STEPS, MORE_STEPS, SAVED_EVERY = 24, 4, 5
# Of losses after as many steps, whose sums two implementations round differently.
WITHIN = 1e-3
MEGATRON = {"implementation": "Megatron"}


def build_job(name: str, steps: int, model: dict[str, Any]) -> Job:
    """The example over two nodes, with everything that a later job may start from."""
    job = over_two_nodes(read_example())
    sections = {
        "model": model,
        "data": {"maxLength": 64},
        "training": {"maxSteps": steps, "evalEvery": None, "scheduler": {"kind": "Constant"}},
        "checkpoint": {"everySteps": SAVED_EVERY, "exportMegatron": True},
        "storage": {"size": "2Gi"},
    }
    return job | {"metadata": {"name": name}, "spec": merge_sections(job["spec"], sections)}


def test_megatrons_model_outlives_a_pod_and_its_checkpoint_is_the_model_of_another_job(
    nodes: Cluster, namespace: str, tmp_path: Path
) -> None:
    first = submit_job(nodes, namespace, build_job("megatron", STEPS, MEGATRON))
    until(lambda: first.run().checkpoints(), seconds=TRAINING_SECONDS, waiting_for=first.describe)
    uids = first.pod_uids()
    kill_pod(nodes, namespace, next(iter(uids)))
    first.await_end()
    assert first.read()["status"]["restarts"]["pods"] == 1

    native = run_here(build_job("native", STEPS, {}), tmp_path)
    assert first.run().losses() == pytest.approx(native.losses(), rel=WITHIN)

    source = f"pvc://{first.name}-storage/{first.name}/export-megatron"
    second = submit_job(nodes, namespace, build_job("again", MORE_STEPS, MEGATRON | {"source": source}))
    second.await_end()
    more = tmp_path / "more"
    more.mkdir()
    continued = run_here(build_job("more", MORE_STEPS, {"source": str(first.run().folder / "export")}), more)
    assert second.run().losses() == pytest.approx(continued.losses(), rel=WITHIN)
