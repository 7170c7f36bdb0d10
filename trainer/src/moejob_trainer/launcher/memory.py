"""Memory of this container: the processes that the kernel killed for it, and how much of it may be pinned."""

from __future__ import annotations

import resource
from pathlib import Path

from moejob_api.job import Spec
from moejob_api.quantities import readable_bytes

# Of the second version of cgroups and of the first, as a container sees its own.
_COUNTERS = ("memory.events", "memory/memory.oom_control")
_NAME = "oom_kill"


def count_memory_kills(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of such kills until now; 0 where no counter can be read."""
    for counter in _COUNTERS:
        try:
            lines = (root / counter).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{_NAME} ")), 0)
    return 0


def pinning_trouble(spec: Spec, limit_bytes: int) -> str | None:
    """Return the reason that NCCL cannot register memory with RDMA cards; None without cards or a limit.

    No capability of the pod mends it: its user is not root, and an added capability is not granted to it.
    """
    if spec.resources.rdma is None or limit_bytes == resource.RLIM_INFINITY:
        return None
    return (
        f"a process may pin {readable_bytes(limit_bytes)} of memory, and NCCL pins what cards for RDMA read; set "
        "LimitMEMLOCK=infinity for the container runtime of this node"
    )


def pinned_limit_bytes() -> int:
    """Return how much of its memory a process here may pin."""
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
