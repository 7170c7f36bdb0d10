"""How much memory a job takes: on each GPU, in each pod's host memory, on the volume. Formulas only, no torch.

docs/memory.md explains every formula and compares it with measurements.
"""

from moejob_api.memory.engine import Engine
from moejob_api.memory.estimate import MemoryEstimate, Part, PhasePeak, estimate
from moejob_api.memory.phases import Name, Phase
from moejob_api.memory.remedies import Change, Remedy, remedies
from moejob_api.memory.storage import checkpoint_bytes, export_bytes

__all__ = [
    "Change",
    "Engine",
    "MemoryEstimate",
    "Name",
    "Part",
    "Phase",
    "PhasePeak",
    "Remedy",
    "checkpoint_bytes",
    "estimate",
    "export_bytes",
    "remedies",
]
