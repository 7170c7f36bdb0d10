"""The variables of torchrun in a pod follow from its place in the gang."""

from __future__ import annotations

import pytest

from builders import spec
from moejob_api.contract.pod_environment import PodAddresses, PodContract
from moejob_api.contract.pods import PodRole
from moejob_api.contract.torchrun import TorchrunVariable, torchrun_environment


def pod_contract(index: int, nodes: int = 1, ranks: int = 1) -> PodContract:
    address = PodAddresses(f"pod-{index}", "pod-0", 29400, 9400, "pod-0", 29500)
    return PodContract(
        job="job",
        namespace="team",
        uid="uid",
        spec=spec(),
        role=PodRole.TRAINER,
        attempt=2,
        index=index,
        nodes=nodes,
        ranks=ranks,
        address=address,
        run_folder="/run",
        grace_seconds=60,
    )


def test_a_spare_says_no_place_for_it_has_none() -> None:
    spare, member = (torchrun_environment(pod_contract(index, nodes=2)) for index in (2, 1))
    assert member.keys() - spare.keys() == {"RANK", "PET_NODE_RANK"}
    assert spare.items() <= torchrun_environment(pod_contract(0, nodes=2)).items()


@pytest.mark.parametrize(
    ("index", "nodes", "ranks", "expected"),
    [
        pytest.param(0, 1, 1, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}, id="one rank"),
        pytest.param(0, 2, 8, {"WORLD_SIZE": "16", "RANK": "0", "PET_NODE_RANK": "0"}, id="the first of two pods"),
        pytest.param(
            1, 2, 8, {"WORLD_SIZE": "16", "RANK": "8", "PET_NODE_RANK": "1", "PET_NNODES": "2"}, id="the second"
        ),
    ],
)
def test_a_pod_says_its_place_as_torchrun_and_pytorchjob_do(
    index: int, nodes: int, ranks: int, expected: dict[str, str]
) -> None:
    variables = torchrun_environment(pod_contract(index, nodes, ranks))
    assert variables.keys() == set(TorchrunVariable)
    assert variables.items() >= expected.items()
    assert variables["LOCAL_WORLD_SIZE"] == variables["PET_NPROC_PER_NODE"] == str(ranks)
    assert variables["MASTER_ADDR"] == variables["PET_MASTER_ADDR"] == "pod-0"
    assert variables["MASTER_PORT"] == variables["PET_MASTER_PORT"] == "29500"
