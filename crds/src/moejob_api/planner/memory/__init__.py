"""The memory that a job takes: on each GPU, in each pod's host memory, on the volume. Formulas only, no torch.

docs/memory.md explains every formula and compares it with measurements.
"""

from moejob_api.planner.memory.engine import EngineMemory
from moejob_api.planner.memory.estimate import MemoryEstimate, MemoryPart, PhasePeak, estimate_memory
from moejob_api.planner.memory.phases import MemoryPhase, MemoryUse
from moejob_api.planner.memory.storage import VolumeNeed, checkpoint_bytes, download_bytes, export_bytes, volume_need

__all__ = [
    "EngineMemory",
    "MemoryEstimate",
    "MemoryPart",
    "MemoryPhase",
    "MemoryUse",
    "PhasePeak",
    "VolumeNeed",
    "checkpoint_bytes",
    "download_bytes",
    "estimate_memory",
    "export_bytes",
    "volume_need",
]
