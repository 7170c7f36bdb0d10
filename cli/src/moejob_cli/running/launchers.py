"""The launchers of one attempt: one for each simulated node, on loopback addresses of its own. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.engines import colocated_per_pod, engine_urls, separate_engines
from moejob_api.contract.pod_environment import PodAddresses, PodContract, contract_environment
from moejob_api.contract.pods import Environment, PodRole
from moejob_api.contract.torchrun import TORCHRUN_VARIABLES, torchrun_environment
from moejob_api.job import Spec
from moejob_api.job.resources import Accelerator
from moejob_api.layout.sizes import Layout
from moejob_cli.running.machine import LocalMachine, job_variables

# Any name would do: this machine has no namespaces of other users.
NAMESPACE = "local"
# The default of a cluster, before the operator has measured a save.
GRACE_SECONDS = 600
# Keep traffic on loopback. By default gloo listens at the address of the host's name, NCCL and vLLM at an address that
# other machines reach, and a shell or a job may name a cluster's interface. NCCL matches a name after "=" exactly.
_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "VLLM_HOST_IP": LOOPBACK}


@dataclass(frozen=True, slots=True)
class LocalRun:
    """One job in one run folder."""

    job: str
    uid: str
    spec: Spec
    layout: Layout
    folder: Path
    # All users of a machine can reach its ports: the secret opens the rendezvous and engines to this run alone, and
    # proves its claims on the folder.
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class LauncherPorts:
    """Free ports of this machine, for one attempt."""

    rendezvous: int
    progress: int
    # MASTER_PORT.
    master: int = 0
    # The port of the first engine on an address; other engines take the following ports.
    rollout: int = 0


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """One separate engine to start."""

    index: int
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class LauncherOrder:
    """One launcher to start. Without `cores` it may use all cores."""

    index: int
    host: str
    progress_port: int
    environment: dict[str, str]
    cores: frozenset[int] = frozenset()


def launcher_order(
    run: LocalRun, machine: LocalMachine, ports: LauncherPorts, attempt: int, index: int
) -> LauncherOrder:
    """The launcher of one simulated node."""
    address = _pod_addresses(index, ports)
    orders = _pod_orders(run, PodRole.TRAINER, address, attempt, index)
    environment = (
        _process_environment(run, machine, orders, ports.rollout)
        | torchrun_environment(orders)
        | _gpu_variables(run, machine, index)
    )
    return LauncherOrder(
        index, address.host, ports.progress, environment, _core_share(machine.cores, index, run.layout.nodes)
    )


def engine_orders(run: LocalRun, machine: LocalMachine, ports: LauncherPorts) -> tuple[EngineOrder, ...]:
    """Separate engines, all on the first address; none if engines share the trainer's GPUs."""
    count = 0 if run.spec.grpo is None else separate_engines(run.spec)
    address = _pod_addresses(0, ports)
    return tuple(
        EngineOrder(
            index,
            _process_environment(run, machine, _pod_orders(run, PodRole.ROLLOUT, address, 0, index), ports.rollout)
            | _engine_gpu_variables(run, machine, index),
        )
        for index in range(count)
    )


def _pod_addresses(index: int, ports: LauncherPorts) -> PodAddresses:
    first = host_address(0)
    return PodAddresses(host_address(index), first, ports.rendezvous, ports.progress, first, ports.master)


def most_engines_per_host(run: LocalRun) -> int:
    """The ports that engines take on one address."""
    return max(separate_engines(run.spec), colocated_per_pod(run.spec, run.layout.gpus_per_pod))


def _pod_orders(run: LocalRun, role: PodRole, address: PodAddresses, attempt: int, index: int) -> PodContract:
    return PodContract(
        job=run.job,
        namespace=NAMESPACE,
        uid=run.uid,
        spec=run.spec,
        role=role,
        attempt=attempt,
        index=index,
        nodes=run.layout.nodes,
        ranks=run.layout.gpus_per_pod,
        address=address,
        run_folder=str(run.folder),
        grace_seconds=GRACE_SECONDS,
        secret=run.secret,
    )


def _process_environment(
    run: LocalRun, machine: LocalMachine, orders: PodContract, rollout_port: int
) -> dict[str, str]:
    # The shell may be in a pod of another job: variables of its contract must not mix with these.
    foreign = {*Environment, *TORCHRUN_VARIABLES}
    inherited = {name: value for name, value in machine.environment.items() if name not in foreign}
    contract = contract_environment(orders) | _engine_variables(run, machine, rollout_port)
    contract_variables = {name.value: value for name, value in contract.items()}
    return inherited | job_variables(run.spec) | _ON_LOOPBACK | contract_variables


def _engine_variables(run: LocalRun, machine: LocalMachine, first_port: int) -> dict[Environment, str]:
    """Addresses of all engines, and the Python that starts colocated engines."""
    if run.spec.grpo is None:
        return {}
    separate, colocated = separate_engines(run.spec), colocated_per_pod(run.spec, run.layout.gpus_per_pod)
    hosts = [host_address(index) for index in range(run.layout.nodes)]
    urls = engine_urls(hosts[:1], separate, first_port) or engine_urls(hosts, colocated, first_port)
    return {Environment.ROLLOUT_URLS: ",".join(urls), Environment.ROLLOUT_PYTHON: str(machine.rollout_python)}


def _engine_gpu_variables(run: LocalRun, machine: LocalMachine, index: int) -> dict[str, str]:
    """The GPUs of one separate engine, behind the trainer's GPUs."""
    if run.spec.grpo is None or run.spec.resources.accelerator is not Accelerator.GPU:
        return {}
    tensor = run.spec.grpo.rollout.tensor
    first = run.layout.gpus + index * tensor
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[first : first + tensor])}


def host_address(index: int) -> str:
    """The address of a simulated node."""
    return f"127.0.0.{index + 1}"


def _gpu_variables(run: LocalRun, machine: LocalMachine, index: int) -> dict[str, str]:
    """The GPUs of one node: ranks count from 0 in each."""
    if run.spec.resources.accelerator is not Accelerator.GPU:
        return {}
    gpus_per_node = run.layout.gpus_per_pod
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[index * gpus_per_node : (index + 1) * gpus_per_node])}


def _core_share(cores: Sequence[int], index: int, nodes: int) -> frozenset[int]:
    """Return the cores of one node; without a share, the ranks of every node would use all cores."""
    if nodes == 1 or nodes > len(cores):
        return frozenset()
    return frozenset(cores[index * len(cores) // nodes : (index + 1) * len(cores) // nodes])
