"""What is started for one attempt: a launcher for each simulated node, on loopback addresses of its own. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moejob_api.contract import Environment, Role
from moejob_api.job import Spec
from moejob_api.job.resources import Accelerator
from moejob_api.layout.sizes import Layout
from moejob_api.pod_environment import Address, PodOrders, contract_environment
from moejob_cli.running.machine import Machine, job_variables

# Nothing on this machine is another user's: a namespace only has to be one.
NAMESPACE = "local"
# As in a cluster before the first save has been measured.
GRACE_SECONDS = 600


@dataclass(frozen=True, slots=True)
class RunOf:
    """One job in one run folder."""

    job: str
    uid: str
    spec: Spec
    layout: Layout
    folder: Path


@dataclass(frozen=True, slots=True)
class Ports:
    """Free ports of this machine, for one attempt."""

    rendezvous: int
    progress: int


@dataclass(frozen=True, slots=True)
class LauncherOrder:
    """One launcher to start. No cores: it may use all."""

    index: int
    host: str
    progress_port: int
    environment: dict[str, str]
    cores: frozenset[int] = frozenset()


def launcher_order(run: RunOf, machine: Machine, ports: Ports, attempt: int, index: int) -> LauncherOrder:
    """The launcher of one simulated node."""
    address = Address(host(index), host(0), ports.rendezvous, ports.progress)
    said = contract_environment(
        PodOrders(
            job=run.job,
            namespace=NAMESPACE,
            uid=run.uid,
            spec=run.spec,
            role=Role.TRAINER,
            attempt=attempt,
            index=index,
            nodes=run.layout.nodes,
            ranks=run.layout.gpus_per_pod,
            address=address,
            run_folder=str(run.folder),
            grace_seconds=GRACE_SECONDS,
        )
    )
    # A contract inherited from elsewhere (a pod that moejob run is typed in) must not mix with this one.
    inherited = {name: value for name, value in machine.environment.items() if name not in set(Environment)}
    environment = inherited | job_variables(run.spec) | _gpus(run, machine, index)
    environment |= {name.value: value for name, value in said.items()}
    return LauncherOrder(
        index, address.host, ports.progress, environment, _share(machine.cores, index, run.layout.nodes)
    )


def host(index: int) -> str:
    """The address of a simulated node."""
    return f"127.0.0.{index + 1}"


def _gpus(run: RunOf, machine: Machine, index: int) -> dict[str, str]:
    """The GPUs of one node: ranks count from 0 in each."""
    if run.spec.resources.accelerator is not Accelerator.GPU:
        return {}
    each = run.layout.gpus_per_pod
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[index * each : (index + 1) * each])}


def _share(cores: Sequence[int], index: int, nodes: int) -> frozenset[int]:
    """The cores of one node: ranks of every node would take all of them."""
    if nodes == 1 or nodes > len(cores):
        return frozenset()
    return frozenset(cores[index * len(cores) // nodes : (index + 1) * len(cores) // nodes])
