"""The variables of torchrun in trainer pods: scripts, libraries and users of PyTorchJob know these and no others.

A pod has them as torchrun's arguments (PET_*) and as PyTorchJob sets them. Its launcher sets those of each rank, for
the pod of rank 0 may be another after a restart.
"""

from __future__ import annotations

from enum import StrEnum

from moejob_api.contract.pod_environment import PodContract


class TorchrunVariable(StrEnum):
    """Variables of a pod. A job may set none of them."""

    MASTER_ADDR = "MASTER_ADDR"
    MASTER_PORT = "MASTER_PORT"
    WORLD_SIZE = "WORLD_SIZE"
    # Of the first rank of the pod.
    RANK = "RANK"
    LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
    PET_NNODES = "PET_NNODES"
    PET_NODE_RANK = "PET_NODE_RANK"
    PET_NPROC_PER_NODE = "PET_NPROC_PER_NODE"
    PET_MASTER_ADDR = "PET_MASTER_ADDR"
    PET_MASTER_PORT = "PET_MASTER_PORT"


# Launchers set these for each rank.
RANK_VARIABLES = ("LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
_OF_PLACE = (TorchrunVariable.RANK, TorchrunVariable.PET_NODE_RANK)
TORCHRUN_VARIABLES: tuple[str, ...] = (*TorchrunVariable, *RANK_VARIABLES)


def torchrun_environment(contract: PodContract) -> dict[str, str]:
    """The variables of a trainer pod."""
    host, port = contract.address.master_host, str(contract.address.master_port)
    variables = {
        TorchrunVariable.MASTER_ADDR.value: host,
        TorchrunVariable.MASTER_PORT.value: port,
        TorchrunVariable.WORLD_SIZE.value: str(contract.nodes * contract.ranks),
        TorchrunVariable.RANK.value: str(contract.index * contract.ranks),
        TorchrunVariable.LOCAL_WORLD_SIZE.value: str(contract.ranks),
        TorchrunVariable.PET_NNODES.value: str(contract.nodes),
        TorchrunVariable.PET_NODE_RANK.value: str(contract.index),
        TorchrunVariable.PET_NPROC_PER_NODE.value: str(contract.ranks),
        TorchrunVariable.PET_MASTER_ADDR.value: host,
        TorchrunVariable.PET_MASTER_PORT.value: port,
    }
    if contract.index < contract.nodes:
        return variables
    # A spare gets its ranks with the place of a lost pod, after its environment was made.
    return {name: value for name, value in variables.items() if name not in _OF_PLACE}
