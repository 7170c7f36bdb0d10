"""Megatron's own model over two nodes: a pod that is lost, and the checkpoint of one job as the model of the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import merge_sections
from cluster.extent import in_full
from cluster.nodes.cluster import Cluster
from cluster.nodes.faults import kill_pod
from cluster.nodes.training import TRAINING_SECONDS, Job, over_two_nodes, read_example, run_here, submit_job
from cluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("home")]

STEPS, SAVED_EVERY = 24, 5
# Two implementations round sums differently, and each step at this rate makes more of it.
ALIKE_STEPS, WITHIN = 6, 1e-3
# One implementation in one layout, on other machines.
SAME = 1e-5
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


@in_full
def test_megatrons_model_outlives_a_pod_and_its_checkpoint_is_the_model_of_another_job(
    nodes: Cluster, namespace: str, tmp_path: Path
) -> None:
    def make_folder(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        return folder

    first = submit_job(nodes, namespace, build_job("megatron", STEPS, MEGATRON))
    # Before that it may have no claim.
    until(lambda: first.phase == "Running", seconds=TRAINING_SECONDS, waiting_for=first.describe)
    until(lambda: first.run().checkpoints(), seconds=TRAINING_SECONDS, waiting_for=first.describe)
    uids = first.pod_uids()
    kill_pod(nodes, namespace, next(iter(uids)))
    first.await_end()
    assert first.read()["status"]["restarts"]["pods"] == 1

    undisturbed = run_here(build_job("undisturbed", STEPS, MEGATRON), make_folder("undisturbed"))
    assert first.run().losses() == pytest.approx(undisturbed.losses(), rel=SAME)
    native = run_here(build_job("native", ALIKE_STEPS, {}), make_folder("native")).losses()
    assert {step: first.run().losses()[step] for step in native} == pytest.approx(native, rel=WITHIN)

    source = f"pvc://{first.name}-storage/{first.name}/export-megatron"
    second = submit_job(nodes, namespace, build_job("again", ALIKE_STEPS, MEGATRON | {"source": source}))
    second.await_end()
    # The same weights, written for Hugging Face, under the same layers: what the checkpoint says is all that differs.
    exported = build_job("exported", ALIKE_STEPS, MEGATRON | {"source": str(first.run().folder / "export")})
    expected = run_here(exported, make_folder("exported"))
    assert second.run().losses() == pytest.approx(expected.losses(), rel=SAME)
