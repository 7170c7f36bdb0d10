"""The memory of GPUs, and their speed of computing and communicating.

Published numbers, and the shares of them that are reached. Knows nothing of jobs but which GPU they ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.job.resources import Accelerator, GpuType, Resources
from moejob_api.quantities import GIB

# The oldest driver that runs CUDA 13 of the GPU images, on every kind of GPU here.
OLDEST_DRIVER, CUDA_OF_IMAGES = 580, 13
TERA = 10**12
GIGA = 10**9


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of GPU and the node around it; every rate is for one GPU and one direction.

    memory_bytes is what torch can allocate, a little less than the data sheet says.
    """

    name: str
    memory_bytes: int
    bf16_flops_per_second: float
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float
    network_bytes_per_second: float
    host_bytes_per_second: float


# Data sheets: dense bf16 without sparsity, SXM boards; NVLink in one direction; one 400 Gb/s card a GPU (A100: 200).
# memory_bytes are what the driver leaves: 81,559 MiB of an H100, 143,771 of an H200, less its own half GiB.
A100 = Hardware("A100", int(79.1 * GIB), 312 * TERA, 2.0 * TERA, 300 * GIGA, 25 * GIGA, 25 * GIGA)
H100 = Hardware("H100", int(79.1 * GIB), 989 * TERA, 3.35 * TERA, 450 * GIGA, 50 * GIGA, 50 * GIGA)
H200 = Hardware("H200", int(139.8 * GIB), 989 * TERA, 4.8 * TERA, 450 * GIGA, 50 * GIGA, 50 * GIGA)
B200 = Hardware("B200", int(178.3 * GIB), 2250 * TERA, 8.0 * TERA, 900 * GIGA, 50 * GIGA, 50 * GIGA)
# Grace hands out its memory over NVLink-C2C, ten times as fast as PCIe.
GB200 = Hardware("GB200", int(184.0 * GIB), 2500 * TERA, 8.0 * TERA, 900 * GIGA, 50 * GIGA, 225 * GIGA)
# A core or two of a laptop or test machine, so that CPU jobs get a plan too; its speed measures nothing.
CPU = Hardware("CPU", 0, 0.1 * TERA, 20 * GIGA, 5 * GIGA, 1 * GIGA, 20 * GIGA)


def gpu_hardware(gpu_type: GpuType) -> Hardware:
    """The hardware of a GPU type that a job can name."""
    match gpu_type:
        case GpuType.A100:
            return A100
        case GpuType.H100:
            return H100
        case GpuType.H200:
            return H200
        case GpuType.B200:
            return B200
        case GpuType.GB200:
            return GB200


def job_hardware(resources: Resources) -> Hardware:
    """The hardware a job runs on; where it does not say, the speed of an H100, the most common one."""
    if resources.accelerator is Accelerator.CPU:
        return CPU
    return gpu_hardware(resources.gpu_type) if resources.gpu_type is not None else H100


def memory_limit_bytes(resources: Resources) -> int | None:
    """Memory of one GPU; None when the job does not say, and then nothing is refused for memory."""
    if resources.accelerator is Accelerator.CPU:
        return None
    if resources.gpu_memory_gi_b is not None:
        return resources.gpu_memory_gi_b * GIB
    return gpu_hardware(resources.gpu_type).memory_bytes if resources.gpu_type is not None else None
