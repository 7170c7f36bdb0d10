"""torchrun without arguments runs a script in the pods of a job: the pods' environment says all that it asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from builders import spec
from moejob_api.contract.pod_environment import PodAddresses, PodContract
from moejob_api.contract.pods import PodRole
from moejob_api.contract.torchrun import torchrun_environment
from ports import free_port

SCRIPT = Path(__file__).with_name("torchrun_script.py")


def pod_environment(index: int, port: int) -> dict[str, str]:
    host = f"127.0.0.{index + 1}"
    contract = PodContract(
        job="job",
        namespace="team",
        uid="uid",
        spec=spec(),
        role=PodRole.TRAINER,
        attempt=0,
        index=index,
        nodes=2,
        ranks=2,
        address=PodAddresses(host, "127.0.0.1", 29400, 9400, "127.0.0.1", port),
        run_folder="/run",
        grace_seconds=60,
    )
    threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return (
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        | threads
        | (torchrun_environment(contract))
    )


def test_torchrun_without_arguments_runs_a_script_on_all_ranks_of_two_pods() -> None:
    port = free_port()
    # Without arguments but the script: its number of nodes, ranks and its address are in the environment.
    command = [sys.executable, "-m", "torch.distributed.run", str(SCRIPT)]
    pods = [
        subprocess.Popen(command, env=pod_environment(index, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for index in (1, 0)
    ]
    outputs = [pod.communicate(timeout=240)[0].decode() for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(outputs)
    assert [f"rank {rank} of 4: 10" in outputs[0] for rank in range(4)] == [False, False, True, True], outputs[0]
    assert [f"rank {rank} of 4: 10" in outputs[1] for rank in range(4)] == [True, True, False, False], outputs[1]
