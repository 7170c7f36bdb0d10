"""Pods go to the nodes that the installation names for their type of GPU, and have the size of /dev/shm of the plan."""

from __future__ import annotations

from typing import Any

import pytest

from fake_world import World
from moejob_api.contract.pods import PodRole
from moejob_api.job.resources import GpuType

H100_NODES = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "pool": "gpus"}
ENGINES: dict[str, Any] = {
    "method": "GRPO",
    "grpo": {
        "rewards": [{"name": "math"}],
        "maxNewTokens": 256,
        "promptsPerStep": 2,
        "rollout": {"placement": "Separate", "replicas": 1},
    },
}


@pytest.mark.parametrize(
    ("resources", "selector"),
    [
        pytest.param({"gpuType": "H100"}, H100_NODES, id="a type of the table"),
        pytest.param({"gpuType": "H200"}, {}, id="a type that the table lacks"),
        pytest.param({}, {}, id="no type"),
        pytest.param(
            {"gpuType": "H100", "nodeSelector": {"pool": "mine", "zone": "a"}},
            H100_NODES | {"pool": "mine", "zone": "a"},
            id="the job's own labels win",
        ),
    ],
)
def test_pods_go_to_nodes_with_gpus_of_their_type(resources: dict[str, Any], selector: dict[str, str]) -> None:
    world = World(gpu_nodes={GpuType.H100: H100_NODES})
    world.apply(resources={"gpusPerNode": 1} | resources, **ENGINES)
    world.settle()
    for role in PodRole:
        assert world.pod(0, role)["spec"].get("nodeSelector", {}) == selector


def test_a_spare_is_a_trainer_pod_with_an_index_beyond_the_gang_and_the_gpus_of_any_other() -> None:
    world = World()
    world.apply(resources={"spares": 2})
    world.settle()
    assert world.pod_names() == ["0-0", "0-1"]
    world.run()
    world.settle()
    assert world.pod_names() == ["0-0", "0-1", "0-2", "0-3"]
    containers = [world.pod(index)["spec"]["containers"][0] for index in range(4)]
    assert all(container["resources"] == containers[0]["resources"] for container in containers)
    variables = [{variable["name"]: variable.get("value") for variable in one["env"]} for one in containers]
    places = [(found["MOEJOB_INDEX"], found["MOEJOB_NODES"], found["MOEJOB_SPARE_HOSTS"]) for found in variables]
    spares = ",".join(found["MOEJOB_HOST"] for found in variables[2:])
    assert places == [(str(index), "2", spares) for index in range(4)]
    layout = world.status.layout
    assert layout is not None
    assert (layout.gpus, layout.nodes, layout.spares) == (4, 2, 2)


def test_dev_shm_grows_with_the_gpus_of_each_pod() -> None:
    world = World()
    world.apply(**ENGINES | {"parallelism": {"data": 8}, "resources": {"gpusPerNode": 4}})
    world.settle()
    sizes = [world.pod(0, role)["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] for role in PodRole]
    assert sizes == ["8Gi", "2Gi"]
